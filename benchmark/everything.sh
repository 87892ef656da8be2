#!/usr/bin/env bash
# Every run behind benchmark/README.md and docs/atari.md, the most wanted first.
#
#     bash benchmark/everything.sh              run what is missing, two runs at a time
#     bash benchmark/everything.sh --dry-run    print the commands of the runs that are not done
#
# What is done is skipped, what was interrupted is resumed (a baseline begins again). Two runs at a
# time, with one thread each, want two idle cores. Then `python benchmark/report.py` makes the page.
set -eu
cd "$(dirname "$0")/.."
options=("$@")
run() { python benchmark/run.py "${options[@]}" "$@"; }
nine=core6,pendulum-swingup,finger-spin,ball_in_cup-catch
goals=walker-walk,cheetah-run,cartpole-swingup,reacher-hard

# the main table; the other two scripts learn two tasks
run --tasks dmc18 --seeds 1
run --tasks dmc18 --seeds 3
run --script mpo_parametric.py --tasks walker-walk,cartpole-swingup
run --script mpo_distributed.py --tasks walker-walk,cartpole-swingup --processes 2 --workers 1

# baselines: PPO gets three times as many steps
for algorithm in sac ddpg; do
    run --script benchmark/baselines.py --tasks $nine --label $algorithm -- --algorithm $algorithm
done
run --script benchmark/baselines.py --tasks $nine --label ppo --total-timesteps 300000 \
    -- --algorithm ppo

# time to a return: MPO and SAC side by side, task by task
for task in ${goals//,/ }; do
    run --tasks "$task" --label time/mpo_continuous --workers 1 --total-timesteps 250000 &
    run --script benchmark/baselines.py --tasks "$task" --label time/sac --workers 1 \
        --total-timesteps 250000 -- --algorithm sac
    wait $!
done

# the ablation, and the entropy bonus by its scale
run --script mpo_parametric.py --tasks ablation3 --seeds 3
run --script mpo_parametric.py --tasks ablation3 --seeds 3 --label mpo_parametric-epg \
    -- --constraint entropy
run --script mpo_parametric.py --tasks ablation3 --seeds 3 --label mpo_parametric-actor-critic \
    -- --constraint entropy --policy-samples 1
for scale in 0.001 0.01 0.1; do
    run --script mpo_parametric.py --tasks walker-walk,cartpole-swingup --label epg/$scale \
        -- --constraint entropy --entropy-scale $scale
done

# parkour, all of the paper's domains, longer runs, high-dimensional bodies
parkour=benchmark.parkour:ParkourWalker2D-v0
run --tasks $parkour --total-timesteps 400000
run --script benchmark/baselines.py --tasks $parkour --label ppo --total-timesteps 400000 \
    -- --algorithm ppo
run --tasks paper15
run --tasks walker-walk,cheetah-run,pendulum-swingup,finger-spin,hopper-stand \
    --total-timesteps 500000
run --script mpo_distributed.py --tasks humanoid-stand --processes 2 --workers 1 \
    -- --policy-layers 200 200 --critic-layers 300 300
run --tasks humanoid_CMU-run --total-timesteps 50000 --workers 1 \
    -- --policy-layers 200 200 --critic-layers 300 300

# games
run --script mpo_atari.py --tasks ALE/Boxing-v5,ALE/Breakout-v5,ALE/Qbert-v5,ALE/Tennis-v5 \
    --total-timesteps 250000
run --script mpo_atari.py --tasks ALE/Pong-v5 --total-timesteps 800000
run --script benchmark/dqn.py --tasks ALE/Pong-v5,ALE/Boxing-v5 --label dqn \
    --total-timesteps 250000
