"""MPO in pictures: each figure on a problem small enough to see, by the scripts' own functions.

    python docs/pictures.py     draw all of them into docs/img (docs/build.py does it too)

A figure is a pair of functions: the first, shown beside the figure, computes; `draw_NAME` draws
its panels.
"""

import csv
import math
import re
import sys
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.patches import Ellipse

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))

from mpo_atari import categorical_kl  # noqa: E402
from mpo_continuous import (  # noqa: E402
    gaussian_log_prob,
    improved_policy,
    kl_covariance,
    kl_mean,
    retrace,
    temperature_dual,
)

# Okabe and Ito's colours, as in benchmark/: they tell apart in every common colour blindness.
BLUE, RED, GREEN, PINK, ORANGE, SKY, GREY = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#777777",
)
EPSILONS, SHADES = (0.01, 0.1, 1.0), (SKY, BLUE, RED)
STYLE = {
    "font.size": 9,
    "font.family": "sans-serif",
    "axes.titlesize": 9.5,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.8,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "mpo",
    "path.simplify": False,  # else rounding decides which points are left out
}
# What matplotlib draws in black follows the reader's colour scheme.
DARK = """<style>
  text { fill: currentColor }
  @media (prefers-color-scheme: dark) { :root { color: #ddd } }
 </style>"""


# ---- What several figures need
def least(dual):
    """The eta at which a convex function of it is least: bisection on the sign of its slope."""
    low, high = torch.tensor(-10.0).double(), torch.tensor(10.0).double()  # of log eta
    for _ in range(60):
        middle = ((low + high) / 2).requires_grad_()
        slope = torch.autograd.grad(dual(middle.exp()), middle)[0]
        low, high = (middle.detach(), high) if slope < 0 else (low, middle.detach())
    return low.exp()


def normal_quantiles(count):
    """Points [count] that stand for N(0, 1), each with the same probability."""
    return math.sqrt(2) * torch.erfinv((2 * torch.arange(count).double() + 1) / count - 1)


def normal_quadrature(count):
    """Points [count] and logarithms of weights whose sums are integrals over N(0, 1)."""
    points, weights = np.polynomial.hermite_e.hermegauss(count)
    return torch.as_tensor(points), torch.as_tensor(np.log(weights / math.sqrt(2 * math.pi)))


def density(mean, std, action):
    """Of N(mean, std^2) at the points action [M]."""
    mean, std = torch.as_tensor(mean).double(), torch.as_tensor(std).double()
    return gaussian_log_prob(mean.reshape(1), std.reshape(1, 1), action.reshape(-1, 1)).exp()


def m_step(action, weight, mean_i, cholesky_i, epsilon_mu, epsilon_sigma=None):
    """The best Gaussian within the bounds; with epsilon_mu alone, that bounds the whole KL."""

    def best(eta_mu, eta_sigma):  # for given multipliers: where the Lagrangian's gradient is 0
        mean = (weight @ action + eta_mu * mean_i) / (1 + eta_mu)
        away, change = action - mean, (mean - mean_i).unsqueeze(0)
        covariance = (weight * away.mT) @ away + eta_mu * change.mT @ change
        covariance = (covariance + eta_sigma * cholesky_i @ cholesky_i.mT) / (1 + eta_sigma)
        cholesky = torch.linalg.cholesky(covariance)
        kl = kl_mean(mean_i, mean, cholesky), kl_covariance(cholesky_i, cholesky)
        return mean, cholesky, *kl

    if epsilon_sigma is None:
        return best(*2 * [multiplier(lambda eta: sum(best(eta, eta)[2:]), epsilon_mu)])
    inner = lambda eta_sigma: multiplier(lambda eta: best(eta, eta_sigma)[2], epsilon_mu)  # noqa: E731
    eta_sigma = multiplier(lambda eta: best(inner(eta), eta)[3], epsilon_sigma)
    return best(inner(eta_sigma), eta_sigma)


def multiplier(kl, epsilon):
    """The eta at which a KL that falls with it meets its bound; 0 where the bound is slack."""
    low, high = math.log(1e-9), math.log(1e6)
    if kl(0.0) <= epsilon:
        return 0.0
    for _ in range(45):
        middle = (low + high) / 2
        low, high = (middle, high) if kl(math.exp(middle)) > epsilon else (low, middle)
    return math.exp(high)


# ---- 1. The E-step
def one_state():
    action = 0.5 * normal_quantiles(24)  # pi_i = N(0, 0.5^2), a "sample" without luck
    score = value(action)  # Q'(s, a)
    one, log_prior = torch.ones(()), -math.log(24)
    results = []
    for epsilon in EPSILONS:
        eta = least(lambda eta, e=epsilon: temperature_dual(eta, score, log_prior, e, one))
        weight = improved_policy(eta, score, log_prior)  # q(a|s) on the samples
        mean = (weight * action).sum()  # the M-step without bounds
        std = (weight * (action - mean) ** 2).sum().sqrt()
        results.append((eta, weight, mean, std))
    return action, results


def value(action):
    """A Q of one action: a low hump on the left, a high one on the right."""
    left, right = (action + 0.55) / 0.3, (action - 0.75) / 0.35
    return 0.85 * torch.exp(-0.5 * left**2) + torch.exp(-0.5 * right**2)


def draw_one_state(numbers):
    action, results = numbers
    grid = torch.linspace(-1.5, 1.7, 161).double()
    prior = density(0, 0.5, grid)
    for epsilon, (eta, weight, mean, std) in zip(EPSILONS, results):
        figure, axes = panel(f"ε = {epsilon:g}:  η = {eta:.3f}", "action a")
        q = prior * torch.exp(value(grid) / eta)
        axes.plot(grid, value(grid), color=GREEN, linestyle=":", label="Q(a)")
        axes.plot(grid, prior, color=GREY, linestyle="--", label="πᵢ")
        axes.plot(grid, q / torch.trapezoid(q, grid), color=RED, label="q ∝ πᵢ exp(Q/η)")
        axes.plot(grid, density(mean, std, grid), color=BLUE, label="new π")
        axes.vlines(action, 0, 4 * weight, color=ORANGE, linewidth=1.4)
        axes.plot(action, 4 * weight, ".", color=ORANGE, markersize=5, label="4 × weight")
        axes.set_ylim(0, 2.1)
        axes.set_yticks([0, 1, 2])
        axes.legend(loc="upper left")
        yield figure


# ---- 2. The dual
def dual():
    action = 0.5 * normal_quantiles(24)
    score, one, log_prior = value(action), torch.ones(()), -math.log(24)
    etas = torch.logspace(-1.6, 1, 80).double()
    kl = torch.stack(
        [categorical_kl(improved_policy(x, score, log_prior), log_prior) for x in etas]
    )
    curves, minima = [], []
    for epsilon in EPSILONS:
        g = lambda eta, e=epsilon: temperature_dual(eta, score, log_prior, e, one)  # noqa: E731
        curves.append(torch.stack([g(eta) for eta in etas]))
        minima.append((least(g), g(least(g))))
    return etas, kl, curves, minima


def draw_dual(numbers):
    etas, kl, curves, minima = numbers
    figure, axes = panel("the dual g(η)", "temperature η")
    for epsilon, shade, curve, (eta, g) in zip(EPSILONS, SHADES, curves, minima):
        axes.semilogx(etas, curve, color=shade, label=f"ε = {epsilon:g}")
        axes.plot(eta, g, "o", color=shade)
    axes.set_ylim(0.3, 1.6)
    axes.legend(loc="upper left")
    yield figure
    figure, axes = panel("KL(q ‖ πᵢ) at that η", "temperature η")
    axes.loglog(etas, kl, color="black")
    for epsilon, shade, (eta, _) in zip(EPSILONS, SHADES, minima):
        axes.hlines(epsilon, etas[0], eta, color=shade, linestyle="--")
        axes.vlines(eta, 1e-4, epsilon, color=shade, linestyle="--")
        axes.plot(eta, epsilon, "o", color=shade)
    axes.set_ylim(1e-4, 4)
    yield figure


# ---- 3. The M-step
def two_actions():
    mean_i, cholesky_i = torch.tensor([0.0, 0.0]).double(), 0.5 * torch.eye(2).double()
    z = torch.cartesian_prod(normal_quantiles(12), normal_quantiles(12))
    action = mean_i + z @ cholesky_i.mT
    score = -((action @ torch.tensor([1.0, -0.6]).double() - 0.4) ** 2)  # a ridge, aslant
    log_prior = -math.log(len(action))
    g = lambda eta: temperature_dual(eta, score, log_prior, 0.5, torch.ones(()))  # noqa: E731
    weight = improved_policy(least(g), score, log_prior)
    old = (action, weight, mean_i, cholesky_i)
    loose = m_step(*old, epsilon_mu=10, epsilon_sigma=10)
    apart = m_step(*old, epsilon_mu=0.1, epsilon_sigma=0.001)
    together = m_step(*old, epsilon_mu=0.101)
    return old, {"loose bounds": loose, "bounded apart": apart, "bounded together": together}


def draw_two_actions(numbers):
    (action, weight, mean_i, cholesky_i), policies = numbers
    for name, (mean, cholesky, c_mu, c_sigma) in policies.items():
        title = f"{name}: C_μ {c_mu:.3f}, C_Σ {c_sigma:.3f}"
        figure, axes = panel(title, "first action", height=3.0)
        strength = 0.08 + 0.9 * weight / weight.max()
        axes.scatter(*action.T, s=14, color=ORANGE, linewidths=0, alpha=strength)
        ellipse(axes, mean_i, cholesky_i, GREY, "--", "πᵢ")
        q_mean = weight @ action
        spread = (weight * (action - q_mean).T) @ (action - q_mean)
        ellipse(axes, q_mean, torch.linalg.cholesky(spread), RED, ":", "moments of q")
        ellipse(axes, mean, cholesky, BLUE, "-", "new π")
        axes.set_xlim(-1.7, 1.2)
        axes.set_ylim(-1.1, 1.1)
        axes.set_aspect("equal")
        axes.set_ylabel("second action")
        axes.legend(loc="upper left")
        yield figure


def ellipse(axes, mean, cholesky, colour, line, label):
    """Where a Gaussian is one standard deviation from its mean, and its mean."""
    lengths, directions = torch.linalg.eigh(cholesky @ cholesky.mT)
    width, height = 2 * lengths.sqrt()
    x, y = directions[:, 0].tolist()
    angle = math.degrees(math.atan2(y, x)) if width < 0.999 * height else 0.0
    shape = Ellipse(mean.tolist(), float(width), float(height), angle=angle % 180, fill=False)
    shape.set(edgecolor=colour, linestyle=line, linewidth=1.8)
    axes.add_patch(shape)
    axes.plot(*mean.tolist(), "o", color=colour, markersize=4)
    axes.plot([], [], color=colour, linestyle=line, label=label)


# ---- 4. Why a standard deviation can grow
def spread():
    action, log_prior = normal_quadrature(40)  # pi_i = N(0, 1), and Q'(s, a) = a: ever to the right
    g = lambda eta: temperature_dual(eta, action, log_prior, 0.1, torch.ones(()))  # noqa: E731
    weight = improved_policy(least(g), action, log_prior)
    old = (action.unsqueeze(-1), weight, torch.zeros(1).double(), torch.eye(1).double())
    bounds = {
        "the mean free": (10, 10),
        "ε_μ = 0.005, no ε_Σ": (0.005, 10),
        "ε_μ = 0.005, ε_Σ = 1e-4": (0.005, 1e-4),
    }
    return weight @ action, {name: m_step(*old, *pair) for name, pair in bounds.items()}


def draw_spread(numbers):
    shift, policies = numbers
    grid = torch.linspace(-3.5, 3.5, 121).double()
    figure, axes = panel("one iteration, Q(a) = a, ε = 0.1", "action a, in old standard deviations")
    axes.plot(grid, density(0, 1, grid), color=GREY, linestyle="--", label="πᵢ")
    for shade, (name, (mean, std, *_)) in zip((GREEN, PINK, BLUE), policies.items()):
        axes.plot(grid, density(mean, std, grid), color=shade, label=name)
    axes.plot(grid, density(shift, 1, grid), color=RED, linestyle=":", linewidth=3, label="q")
    axes.set_ylim(0, 0.75)
    axes.legend(loc="upper left")
    yield figure
    figure, axes = panel("standard deviation after n iterations", "iterations n")
    count = np.arange(61)
    for shade, (name, (_, std, *_)) in zip((GREEN, PINK, BLUE), policies.items()):
        axes.semilogy(count, std.item() ** count, color=shade, label=f"{name}: ×{std.item():.3f}")
    axes.legend(loc="upper left")
    axes.set_ylim(0.7, 60)
    yield figure


# ---- 5. Retrace
def trajectory():
    reward = torch.tensor([0, 0, 0, 0, 0, 0, 0, 1.0])  # eight steps, rewarded at the end
    ratio = torch.tensor([1, 1, 1, 0.9, 0.15, 1, 1.6, 1.0])  # pi(a_t|s_t) / b(a_t|s_t)
    q = torch.full((8,), 0.2)  # Q'(s_t, a_t), as yet ignorant
    v_next = torch.tensor([0.2, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2, 0.0])  # nothing follows the end
    c_next = torch.cat([ratio.clamp(max=1)[1:], torch.zeros(1)])  # c_{t+1}
    traces = {"one-step: c = 0": 0 * c_next, "n-step: c = 1": 1 + 0 * c_next, "Retrace": c_next}
    batch = [x.expand(3, 8) for x in (q, v_next, reward, torch.full((8,), 0.95))]
    targets = retrace(*batch, torch.stack(list(traces.values())))
    delta = reward + 0.95 * v_next - q
    return delta, c_next, dict(zip(traces, targets))


def draw_trajectory(numbers):
    delta, c_next, targets = numbers
    step = np.arange(8)
    figure, axes = panel("what each step says", "step t")
    axes.bar(step - 0.2, delta.numpy(), 0.4, color=ORANGE, label="δₜ")
    axes.bar(step + 0.2, c_next.numpy(), 0.4, color=GREY, label="trace cₜ₊₁")
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_ylim(-0.1, 1.45)
    axes.legend(loc="upper left", ncols=2)
    yield figure
    figure, axes = panel("targets for Q(sₜ, aₜ)", "step t")
    styles = zip(targets.items(), (GREY, PINK, BLUE), ("s:", "^--", "o-"))
    for (name, target), shade, style in styles:
        axes.plot(step, target, style, color=shade, markersize=5, label=name)
    axes.axhline(0.2, color="black", linewidth=0.8)
    axes.text(7.2, 0.2, "Q′", va="center")
    axes.set_ylim(-0.1, 1.45)
    axes.legend(loc="upper left")
    yield figure


# ---- 6. Forward and reverse KL
def two_humps():
    grid = torch.linspace(-1.6, 1.6, 321).double()
    log_prior = torch.log_softmax(gaussian_log_prob(*old_policy(), grid.unsqueeze(-1)), -1)
    q = improved_policy(0.1, value(grid + 0.1), log_prior)  # pi_i exp(Q/eta), two humps
    begun = [(start, forward) for start in (-0.5, 0.6) for forward in (True, False)]
    return grid, log_prior, q, {each: fit(q, grid, *each) for each in begun}


def fit(q, grid, start, forward):
    """The Gaussian of least KL(q || pi), as in Algorithm 2, or KL(pi || q), as in Algorithm 3."""
    theta = torch.tensor([start, math.log(0.3)]).double().requires_grad_()
    optimiser = torch.optim.LBFGS([theta], max_iter=200, line_search_fn="strong_wolfe")

    def loss():
        optimiser.zero_grad()
        log_pi = gaussian_log_prob(theta[:1], theta[1:].exp().diag(), grid.unsqueeze(-1))
        log_pi = torch.log_softmax(log_pi, -1)
        kl = categorical_kl(q, log_pi) if forward else categorical_kl(log_pi.exp(), q.log())
        kl.backward()
        return kl

    optimiser.step(loss)
    return theta.detach()


def old_policy():
    return torch.zeros(1).double(), 0.6 * torch.eye(1).double()


def draw_two_humps(numbers):
    grid, log_prior, q, fits = numbers
    width = grid[1] - grid[0]
    titles = {True: "Algorithm 2: least KL(q ‖ π)", False: "Algorithm 3: least KL(π ‖ q)"}
    for forward, title in titles.items():
        figure, axes = panel(title, "action a")
        axes.plot(grid[::2], (log_prior.exp() / width)[::2], color=GREY, linestyle="--", label="πᵢ")
        axes.plot(grid[::2], (q / width)[::2], color=RED, label="q ∝ πᵢ exp(Q/η)")
        for start, line in ((0.6, "-"), (-0.5, (0, (4, 1.5)))):
            mean, std = fits[start, forward][0], fits[start, forward][1].exp()
            label = f"π, begun at {start:g}"
            curve = density(mean, std, grid)
            axes.plot(grid[::2], curve[::2], color=BLUE, linestyle=line, label=label)
        axes.set_ylim(0, 5.6)
        axes.legend(loc="upper left")
        yield figure
    figure, axes = panel("the price of a new standard deviation", "σ / σᵢ")
    ratio = torch.logspace(-0.7, 0.7, 57).double()
    new, old = ratio.reshape(-1, 1, 1), torch.ones(57, 1, 1).double()
    axes.semilogx(ratio, kl_covariance(old, new), color=BLUE, label="KL(πᵢ ‖ π), Algorithm 2")
    axes.semilogx(
        ratio, kl_covariance(new, old), color=RED, linestyle="--", label="KL(q ‖ πᵢ), Algorithm 3"
    )
    axes.set_xticks([0.25, 0.5, 1, 2, 4], ["¼", "½", "1", "2", "4"])
    axes.minorticks_off()
    axes.set_ylim(0, 3)
    axes.legend(loc="upper center")
    yield figure


# ---- 7. A run
def run():
    with open(DOCS / "run.csv") as file:
        rows = list(csv.DictReader(file))
    return {
        name: np.array([float(row[name]) for row in rows])
        for name in rows[0]
        if "returns" not in name
    }


def draw_run(numbers):
    steps = numbers["global_step"] / 1000
    evaluated = np.isfinite(numbers["eval/episodic_return"])
    figure, axes = panel("return", "thousand steps")
    axes.plot(steps, numbers["charts/episodic_return"], color=SKY, label="in training")
    mean_action = numbers["eval/episodic_return"][evaluated]
    axes.plot(steps[evaluated], mean_action, "o-", color=BLUE, label="mean action")
    axes.set_xlim(0, steps[-1] * 1.02)
    axes.set_ylim(0, 1000)
    axes.legend(loc="upper left")
    yield figure
    panels = {
        "multipliers": ("eta", "eta_mu", "eta_sigma"),
        "KL relative to its bound": ("kl_q_relative", "kl_mu_relative", "kl_sigma_relative"),
        "mean trace c": ("trace",),
        "standard deviation": ("std_mean", "std_max"),
        "Q": ("q_mean", "q_minus_return"),
    }
    names = {"eta": "η", "eta_mu": "η_μ", "eta_sigma": "η_Σ", "kl_q_relative": "KL(q ‖ πᵢ) / ε"}
    names |= {"kl_mu_relative": "C_μ / ε_μ", "kl_sigma_relative": "C_Σ / ε_Σ", "trace": "c"}
    names |= {"std_mean": "mean", "std_max": "greatest", "q_mean": "mean"}
    names |= {"q_minus_return": "less the return"}
    for title, columns in panels.items():
        figure, axes = panel(title, "thousand steps")
        columns = [column for column in columns if f"mpo/{column}" in numbers]
        for column, shade, line in zip(columns, (RED, BLUE, GREEN), ("-", "--", ":")):
            curve = numbers[f"mpo/{column}"]
            axes.plot(steps, curve, color=shade, linestyle=line, label=names[column])
        if "multipliers" in title:
            axes.set_yscale("log")
        if "bound" in title:
            axes.axhline(1, color="black", linewidth=0.8)
        axes.set_ylim(bottom=None if {"eta", "q_minus_return"} & {*columns} else 0)
        axes.set_xlim(0, steps[-1] * 1.02)
        if len(columns) > 1:
            axes.legend(loc="best")
        yield figure


# ---- Drawing
FIGURES = {
    x.__name__: x for x in (one_state, dual, two_actions, spread, trajectory, two_humps, run)
}


def panel(title, x_label, height=2.7):
    """Small axes with a file of their own: panels stand in a row, or on a phone in a column."""
    figure, axes = plt.subplots(figsize=(3.75, height), layout="constrained")
    axes.set_title(title, loc="left")
    axes.set_xlabel(x_label)
    return figure, axes


def draw(folder):
    """Draw every figure into the folder; returns the files of each, by its name."""
    matplotlib.use("svg")
    torch.set_num_threads(1)
    folder.mkdir(exist_ok=True)
    files = {}
    with plt.rc_context(STYLE):
        for name, compute in FIGURES.items():
            torch.manual_seed(0)
            files[name] = []
            for number, figure in enumerate(globals()[f"draw_{name}"](compute()), start=1):
                path = folder / f"{name.replace('_', '-')}-{number}.svg"
                figure.savefig(path, transparent=True, metadata={"Date": None})
                plt.close(figure)
                path.write_text(shorten(follow_colour_scheme(path.read_text())))
                files[name].append(path)
    return files


def follow_colour_scheme(svg):
    """Black becomes the colour of the text, which is light where the reader has it dark."""
    svg = svg.replace("stroke: #000000", "stroke: currentColor")
    svg = svg.replace("fill: #000000", "fill: currentColor")
    head, rest = svg.split("<defs>", 1)
    made_by = f"<!-- matplotlib {matplotlib.__version__} -->"
    return f"{head}{made_by}\n {DARK}\n <defs>{rest}"


def shorten(svg):
    """Two digits behind the point are finer than a screen, and a third of the size."""
    long = re.compile(r"-?\d+\.\d{3,}(e-\d+)?")
    rounded = lambda tag: long.sub(lambda found: f"{float(found[0]):.2f}", tag[0])  # noqa: E731
    return re.sub(
        r"<metadata>.*?</metadata>", "", re.sub(r"<[^>]*>", rounded, svg), flags=re.DOTALL
    )


if __name__ == "__main__":
    for name, paths in draw(DOCS / "img").items():
        print(f"{name}: {', '.join(path.name for path in paths)}")
