"""The losses and gradients of mpo_continuous.py beside those of before it was rewritten.

    python benchmark/studies/equality.py

The script of commit 8b9d80d is taken from git. Both compute on the same weights and the same random
windows, in float64; for each setting the largest relative difference is printed, of the three
losses and of all gradients.
"""

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
import mpo_continuous as new  # noqa: E402

COMMIT = "8b9d80d"
S, A, B, T, M = 5, 3, 32, 6, 10
MULTIPLIERS = {"eta": 0.3, "eta_mu": 2.0, "eta_sigma": 50.0}
SETTINGS = {
    "the defaults": {},
    "--joint-bound": {"joint_bound": True},
    "--covariance diagonal": {"covariance": "diagonal"},
}


def load_old():
    """The script of that commit as a module."""
    show = ["git", "-C", str(ROOT), "show", f"{COMMIT}:mpo_continuous.py"]
    text = subprocess.run(show, capture_output=True, text=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "old_mpo_continuous.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location("old_mpo_continuous", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    return module


def new_agent(args):
    """Networks whose targets differ from them, as between two copies of the targets."""
    networks = new.Policy(S, A, args), new.Critic(S, A, args)
    networks[1].hidden[4] = torch.nn.Identity()  # a layer norm that the critic did not have then
    agent = new.Agent(*networks, **MULTIPLIERS).double()
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return agent


def old_agent(old, args, agent):
    """The same weights under the names that they had."""
    shape = (args.policy_layers, 0.5, 0.01, 0, args.covariance, True)
    networks = old.Policy(S, A, *shape), old.Critic(S, A, args.critic_layers)
    twin = old.Agent(*networks, **MULTIPLIERS).double()
    names = twin.state_dict().keys()
    twin.load_state_dict(dict(zip(names, (agent.state_dict()[new_name(x)] for x in names))))
    return twin


def new_name(name):
    """hidden.1 of before is hidden.3 now: a linear layer, a norm and a ReLU stand before it."""
    return name.replace("hidden.1.", "hidden.3.").replace("norm.", "hidden.1.")


def windows():
    """Windows of which some meet the end of their episode, with and without a termination."""
    final = torch.zeros(B, T + 1)
    terminated = torch.zeros(B, T + 1)
    for b, length in enumerate(torch.randint(1, 2 * T, (B,)).tolist()):
        if length <= T:
            final[b, length] = 1
            terminated[b, length - 1] = b % 2
    vectors = torch.randn(B, T + 1, S), 0.7 * torch.randn(B, T + 1, A)
    numbers = torch.randn(B, T + 1) - 2, torch.rand(B, T + 1), terminated, final
    return new.Rows(*(x.double() for x in (*vectors, *numbers)))


def difference(ours, theirs):
    return ((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-12)).item()


def compare(old, settings):
    """The largest relative difference of the losses, and of the gradients."""
    args = new.Args(num_samples=M, **settings)
    agent = new_agent(args)
    twin = old_agent(old, args, agent)
    batch, noise = windows(), torch.randn(B, T + 1, M, A).double()
    losses, _ = new.compute_losses(agent, batch, noise, args)

    args.decoupling = "joint" if args.joint_bound else "paper"
    steps = [x[:, :-1] for x in batch[1:5]]
    valid = (batch.final.cumsum(1) == 0)[:, :-1].double()
    *theirs, _ = old.compute_losses(twin, old.Batch(batch.state, *steps, valid), noise, args)
    of_losses = max(map(difference, losses.values(), theirs))

    sum(losses.values()).backward()
    sum(theirs).backward()
    ours = dict(agent.named_parameters())
    pairs = [(ours[new_name(name)].grad, x.grad) for name, x in twin.named_parameters()]
    of_gradients = max(difference(a, b) for a, b in pairs if b is not None)
    return of_losses, of_gradients


if __name__ == "__main__":
    torch.manual_seed(0)
    old = load_old()
    print(f"mpo_continuous.py beside that of {COMMIT}, float64: largest relative difference")
    for name, settings in SETTINGS.items():
        of_losses, of_gradients = compare(old, settings)
        print(f"{name:22} losses {of_losses:.0e}, gradients {of_gradients:.0e}")
