"""The tutorial says what the scripts are now: text and code exactly, figures by their numbers."""

import math
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

DOCS = Path(__file__).resolve().parents[2] / "docs"
sys.path.insert(0, str(DOCS))

build = pytest.importorskip("build", reason="docs/build.py needs the packages of the docs extra")
import pictures  # noqa: E402

from mpo_continuous import gaussian_log_prob, kl_covariance, kl_mean, lagrangian  # noqa: E402

PAGES = ["index", "pictures", "tests"] + [x.removeprefix("mpo_") for x in build.scripts()]
AGAIN = "run python docs/build.py"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("docs")
    build.build(folder)
    return folder


@pytest.fixture(scope="module")
def old():
    """Actions and weights of the figure with two actions, and its pi_i."""
    return pictures.two_actions()[0]


# ---- The committed pages
def test_the_committed_pages_are_what_the_scripts_and_the_text_give_now(built):
    assert sorted(x.name for x in DOCS.glob("*.html")) == sorted(
        x.name for x in built.glob("*.html")
    )
    for page in built.glob("*.html"):
        ours, now = (DOCS / page.name).read_text().splitlines(), page.read_text().splitlines()
        different = [pair for pair in zip(ours, now) if pair[0] != pair[1]]
        assert not different and len(ours) == len(now), f"{page.name}: {AGAIN}; {different[:1]}"


def numbers_and_rest(svg):
    """The numbers of a picture, and the rest of its text without the names made from them."""
    svg = re.sub(r"<!--.*?-->|\b[a-zA-Z][0-9a-f]{10}\b", "", svg, flags=re.DOTALL)
    number = re.compile(r"-?\d+(?:\.\d+)?")
    return [float(x) for x in number.findall(svg)], number.sub("#", svg)


def test_the_committed_figures_have_the_numbers_that_the_scripts_give_now(built):
    drawn, here = (
        re.search(r"<!-- matplotlib (\S+) -->", (folder / "img/run-1.svg").read_text())[1]
        for folder in (DOCS, built)
    )
    if drawn != here:
        pytest.skip(f"drawn with matplotlib {drawn}, which lays out otherwise than {here}")
    names = sorted(x.name for x in (DOCS / "img").glob("*.svg"))
    assert names == sorted(x.name for x in (built / "img").glob("*.svg"))
    for name in names:
        ours, rest = numbers_and_rest((DOCS / "img" / name).read_text())
        now, rest_now = numbers_and_rest((built / "img" / name).read_text())
        assert rest == rest_now, f"{name}: {AGAIN}"
        assert ours == pytest.approx(now, abs=0.05), f"{name}: {AGAIN}"  # a twentieth of a point


def test_another_number_or_another_word_in_a_figure_is_noticed():
    ours, rest = numbers_and_rest('<path id="m0123456789" d="M 1.00 2.00"/><text>pi</text>')
    moved, same = numbers_and_rest('<path id="mabcdef6789" d="M 1.00 2.10"/><text>pi</text>')
    assert rest == same and ours != pytest.approx(moved, abs=0.05)
    assert rest != numbers_and_rest('<path id="m0123456789" d="M 1.00 2.00"/><text>q</text>')[1]


def test_a_page_with_all_it_shows_is_smaller_than_600_kilobytes():
    for page in PAGES:
        text = (DOCS / f"{page}.html").read_text()
        parts = [DOCS / f"{page}.html", DOCS / "style.css"]
        parts += [DOCS / x for x in re.findall(r'<img src="([^"]+)"', text)]
        assert sum(part.stat().st_size for part in parts) < 600_000, page


# ---- The text
def test_functions_entries_lines_of_code_tests_and_figures_all_have_their_counterparts():
    assert build.complaints() == []


@pytest.mark.parametrize(
    "change, complaint",
    [
        (("def log_det(", "def log_determinant("), "mpo_continuous.log_determinant has no entry"),
        (("def log_det(", "def log_determinant("), "speaks of log_det, which no script has"),
        (("dual_loss = ", "loss_of_eta = "), "mpo_continuous.compute_losses has no `dual_loss =`"),
    ],
)
def test_a_renamed_function_or_line_is_complained_of(monkeypatch, tmp_path, change, complaint):
    script = tmp_path / "mpo_continuous.py"
    script.write_text(build.scripts()["mpo_continuous"].read_text().replace(*change))
    monkeypatch.setattr(build, "scripts", lambda: {"mpo_continuous": script})
    assert any(complaint in sentence for sentence in build.complaints())


def test_a_test_that_is_gone_is_complained_of(monkeypatch):
    name = build.linked_tests()[0].rpartition("::")[2]
    left = {test: files for test, files in build.all_tests().items() if test != f"test_{name}"}
    monkeypatch.setattr(build, "all_tests", lambda: left)
    assert any(sentence.endswith(name) for sentence in build.complaints())


def test_a_script_is_shown_whole_up_to_its_plumbing():
    for path in build.scripts().values():
        lines = path.read_text().splitlines()
        end = next(n for n, line in enumerate(lines) if line.startswith(build.PLUMBING))
        shown = {}
        for section in build.sections(path):
            for chunk in section.chunks:
                shown |= dict(enumerate(chunk.source.splitlines(), start=chunk.line))
        assert all(lines[n - 1] == line for n, line in shown.items())
        first = next(n for n, line in enumerate(lines, start=1) if line.startswith("# ---- "))
        left_out = [n for n in range(first, end + 1) if lines[n - 1].strip() and n not in shown]
        assert left_out == []


def test_the_parts_of_a_long_function_are_the_function():
    path = build.scripts()["mpo_continuous"]
    chunks = {chunk.name: chunk for section in build.sections(path) for chunk in section.chunks}
    whole = chunks["compute_losses"]
    parts = build.divide(whole, ["critic_loss =", "dual_loss ="])
    assert [needles for needles, _ in parts] == [[], ["critic_loss ="], ["dual_loss ="]]
    assert "\n\n".join(part.source for _, part in parts) == whole.source
    lines = path.read_text().splitlines()
    assert all(part.source.startswith(lines[part.line - 1]) for _, part in parts)


def test_no_more_than_two_thousand_words():
    words = []
    for path in sorted(DOCS.glob("text/*.md")):
        text = path.read_text().partition("\n## ")[2] if path.stem != "index" else path.read_text()
        text = re.sub(r"^#{2,3} .*$|^- (?!why)\w+: .*$|^\|[-|]*$", "", text, flags=re.MULTILINE)
        text = re.sub(r"\$\$.*?\$\$", "", text, flags=re.DOTALL)
        text = re.sub(r"\]\([^)]*\)", "", text)
        words += re.findall(r"[^\W_](?:[\w'.$\\^{}-]*\w)?", re.sub(r"\$[^$]*\$", "x", text))
    assert 1500 < len(words) <= 2000


def test_no_formula_was_left_as_latex():
    for page in PAGES:
        for math_element in re.findall(r"<math.*?</math>", (DOCS / f"{page}.html").read_text()):
            assert "\\" not in math_element and "<mi>&</mi>" not in math_element, math_element


# ---- Links
class Links(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.ids, self.targets = [], []
        self.feed((DOCS / page).read_text())

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.ids += [attributes["id"]] if "id" in attributes else []
        self.targets += [attributes[x] for x in ("href", "src") if x in attributes]


def test_every_link_leads_somewhere_and_nothing_is_fetched_from_elsewhere():
    pages = {f"{page}.html": Links(f"{page}.html") for page in PAGES}
    for name, page in pages.items():
        assert len(page.ids) == len(set(page.ids)), name
        for target in page.targets:
            if target in (build.PAPER, "data:,"):  # a link that a reader may follow; no icon
                continue
            file, _, anchor = target.partition("#")
            assert (DOCS / (file or name)).is_file(), f"{name}: {target}"
            if anchor:
                assert anchor in pages[file or name].ids, f"{name}: {target}"
    for path in [*DOCS.glob("*.html"), DOCS / "style.css", *DOCS.glob("img/*.svg")]:
        fetched = re.findall(
            r"""(?:src=|url\(|@import|<script)["' ]*(?:http|//|>)""", path.read_text()
        )
        assert not fetched, path.name


# ---- The figures
def test_the_e_step_of_the_first_figure_uses_up_its_bound():
    action, results = pictures.one_state()
    for epsilon, (_, weight, _, _) in zip(pictures.EPSILONS, results):
        kl = (weight * (weight * len(action)).log()).sum()
        assert kl == pytest.approx(epsilon, rel=1e-6)


def test_the_dual_is_least_where_the_kl_is_epsilon():
    etas, kl, curves, minima = pictures.dual()
    for epsilon, curve, (eta, least) in zip(pictures.EPSILONS, curves, minima):
        assert least <= curve.min() + 1e-12
        between = (kl[etas < eta].min(), kl[etas > eta].max())
        assert between[0] > epsilon > between[1]


@pytest.mark.parametrize(
    "epsilon_mu, epsilon_sigma", [(10, 10), (0.1, 0.001), (0.02, 10), (0.101, None)]
)
def test_the_m_step_of_the_figures_is_a_stationary_point_of_the_scripts_lagrangian(
    old, epsilon_mu, epsilon_sigma
):
    action, weight, mean_i, cholesky_i = old
    mean, cholesky, c_mu, c_sigma = pictures.m_step(*old, epsilon_mu, epsilon_sigma)
    mean, cholesky = mean.clone().requires_grad_(), cholesky.clone().requires_grad_()
    if epsilon_sigma is None:
        assert c_mu + c_sigma == pytest.approx(epsilon_mu, rel=1e-6)
    else:
        assert c_mu <= epsilon_mu * (1 + 1e-6) and c_sigma <= epsilon_sigma * (1 + 1e-6)
    likelihood = (weight * gaussian_log_prob(mean, cholesky, action)).sum()
    kls = [kl_mean(mean_i, mean, cholesky), kl_covariance(cholesky_i, cholesky)]
    bounds = [(epsilon_mu, kls[0]), (epsilon_sigma, kls[1])]
    if epsilon_sigma is None:
        bounds = [(epsilon_mu, sum(kls))]
    # the multipliers, of the bounds that bind, which bring the gradient nearest to nothing
    theta = mean, cholesky
    options = {"retain_graph": True, "materialize_grads": True}  # C_Sigma is not of the mean
    gradients = [torch.autograd.grad(likelihood, theta, **options)]
    for epsilon, kl in bounds:
        if kl > epsilon * (1 - 1e-6):
            term = lagrangian(torch.ones(()).double(), epsilon, kl)[1]
            gradients.append(torch.autograd.grad(term, theta, **options))
    flat = [torch.cat([each[0], each[1].tril().flatten()]) for each in gradients]
    residual = flat[0]
    if flat[1:]:
        terms = torch.stack(flat[1:], -1)
        eta = torch.linalg.lstsq(terms, -residual.unsqueeze(-1)).solution
        assert (eta > 0).all()
        residual = residual + (terms @ eta).squeeze(-1)
    assert residual.abs().max() < 1e-6


def test_on_a_slope_q_moves_by_the_root_of_two_epsilon_and_a_held_mean_widens_as_the_closed_form():
    shift, policies = pictures.spread()
    (free, free_std, *_), (held, held_std, *_), (_, bounded_std, _, c_sigma) = policies.values()
    assert shift.item() == pytest.approx(math.sqrt(0.2), rel=1e-6)
    assert free.item() == pytest.approx(math.sqrt(0.2), rel=1e-6)
    assert free_std.item() == pytest.approx(1, rel=1e-6)
    # 1 + 2 epsilon (1 - f)^2 + eta_mu move^2, with f the part of its way that the mean went
    part = held.item() / shift.item()
    eta_mu = 1 / part - 1
    variance = 1 + 0.2 * (1 - part) ** 2 + eta_mu * held.item() ** 2
    assert held_std.item() == pytest.approx(math.sqrt(variance), rel=1e-6)
    assert 1 < bounded_std.item() < held_std.item() < math.sqrt(1.2)
    assert c_sigma == pytest.approx(1e-4, rel=1e-6)


def test_retrace_credits_what_followed_the_strange_action_and_little_before_it():
    _, c_next, targets = pictures.trajectory()
    one_step, n_step, ours = targets.values()
    assert torch.equal(ours[4:], n_step[4:]) and c_next[3] == pytest.approx(0.15)
    for t in range(4):
        assert one_step[t] < ours[t] < one_step[t] + 0.16 * (n_step[t] - one_step[t])


def test_the_forward_kl_covers_both_humps_and_the_reverse_one_picks_the_nearest():
    grid, _, q, fits = pictures.two_humps()
    mean = (q * grid).sum()
    std = (q * (grid - mean) ** 2).sum().sqrt()
    for start in (-0.5, 0.6):
        assert fits[start, True][0] == pytest.approx(mean.item(), abs=0.02)
        assert fits[start, True][1].exp() == pytest.approx(std.item(), rel=0.05)
        assert fits[start, False][0] == pytest.approx(math.copysign(0.63, start), abs=0.05)
        assert fits[start, False][1].exp() < 0.3 * std


def test_the_run_shown_is_a_log_of_mpo_continuous():
    numbers = pictures.run()
    assert numbers["global_step"][-1] == 20_000
    assert {"mpo/eta", "mpo/kl_q_relative", "mpo/trace", "mpo/std_mean"} < set(numbers)


def test_the_words_beside_the_run_are_true_of_it():
    numbers, words = pictures.run(), build.entries(DOCS / "text/pictures.md")["run"].body
    half, end = (x for x in numbers["eval/episodic_return"] if not math.isnan(x))
    noisy = numbers["charts/episodic_return"]
    assert f"returns {half:.0f} of 1000 at half time and {end:.0f}" in " ".join(words.split())
    assert half < noisy.max() and end <= noisy[-1]
    assert f"falls, here to {numbers['mpo/trace'][-1]:.2f}," in words
    assert f"up to {numbers['mpo/std_max'].max():.1f}," in words
    assert numbers["mpo/std_mean"][-1] < numbers["mpo/std_mean"][0]
    relative = [numbers[f"mpo/kl_{x}_relative"][2:].mean() for x in ("q", "mu", "sigma")]
    assert relative == pytest.approx([1, 1, 1], abs=0.5)
    levels = [numbers[f"mpo/{x}"] for x in ("eta", "q_mean")]
    assert levels[0].max() < 2 * levels[0].min() and levels[1].max() > 10 * levels[1].min()
