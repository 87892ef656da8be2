"""Break every formula once, one change at a time, and see whether a test notices.

    python tests/mutants.py                            all the mathematics of mpo_continuous.py
    python tests/mutants.py mpo_parametric lagrangian  of another script, what is called so
    python tests/mutants.py --list                     only say what would be changed

A change is the smallest that means something: + for -, * for /, < for <=, another number, a sign, a
transposition, a `.detach()` or a `.square()` dropped, `mean` for `mean_i`. Each is made to the text
of the script between the banners "Networks" and "Plumbing", and the tests in tests/math run on it
until one fails; for mpo_atari.py those in tests/run of how games are lived, too. What none notices
is printed, and the exit code is then 1. A change that makes no difference to what is computed is
marked in SAME. Functions that two scripts share to the letter are changed in the first alone; the
tests run them from every script. The training loop, main(), is changed only where it is named:
tests/run is what holds it.
Pytest does not run this file. It needs Linux or macOS, for each change is tried in a fork.
"""

import argparse
import ast
import importlib.util
import os
import resource
import sys
import time
from pathlib import Path

import pytest
import torch

os.environ.setdefault("MUJOCO_GL", "disabled")
HERE = Path(__file__).resolve().parent
# the quickest files first; those of a script's own come before them
FILES = "networks losses retrace metrics m_step e_step replay multipliers".split()
APART = "learns kill copied_alone refused_with help same_seed played video stopped process"
# of tests/run/test_games.py: how games are lived
LIVED = "stacks_are stored_as a_limit_on_time rewards_are_clipped actions_drawn"
SCRIPTS = ["mpo_continuous", "mpo_parametric", "mpo_atari", "mpo_distributed"]
SECTIONS = ("# ---- Networks", "# ==== Plumbing")
OPERATORS = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "/",
    ast.Div: "*",
    ast.Pow: "*",
    ast.FloorDiv: "*",
    ast.Mod: "+",
}
SIGNS = {
    **{kind: text for kind, text in zip(OPERATORS, "+ - * / ** // %".split())},
    ast.And: "and",
    ast.Or: "or",
}
COMPARED = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
}
OTHER_NAME = {"sum": "mean", "mean": "sum", "min": "max", "max": "min"}
PAIRS = [
    ("policy", "target_policy"),
    ("critic", "target_critic"),
    ("log_eta_mu", "log_eta_sigma"),
    ("eta_mu", "eta_sigma"),
    ("epsilon_mu", "epsilon_sigma"),
    ("c_mu", "c_sigma"),
    ("valid", "alive"),
    ("multiplier_losses", "constraints"),
    ("descending", "ascending"),
]
OTHER_PART = dict(PAIRS) | {b: a for a, b in PAIRS}
DROPPED = "detach exp log square sqrt rsqrt abs mT long float clone".split()
SLOW_IMPORTS = "shimmy hypothesis scipy.stats scipy.optimize torch._dynamo".split()
PATIENCE = 60  # seconds of computing; a change that makes the tests hang is noticed
# changes that make no difference: what stands before it in the line, the new text, and why
SAME = [
    ("head.weight.data.mul_(", "0.02"),  # a start near zero, whichever
    ("nn.ReLU(inplace=", "False"),  # the same numbers, more slowly
    ("action = mean ", "-"),  # the noise is symmetric
    ("if x.dim() ", "<="),  # a product or a convolution: the same numbers, more slowly
    ("if x.dim() < ", "5"),  # the same
    ("0.5 * (trace - ", "cholesky_i"),  # both are [..., A, A]
    ("0.5 * (trace - cholesky.shape[-", "2"),  # the same
    ("clamp(min=", "2e-30"),  # a weight of 0 times any logarithm
    ("advantage_std.clamp(min=", "2e-06"),  # a floor that only keeps a quotient finite
    ("self.head = int(index[-1] + 1) ", "+"),  # the next index is taken modulo the capacity
    ("self.head = (self.head + len(index)) ", "+"),  # the same
    (".generate_state(", "2"),  # more words, of which the first is taken
    ("modules.insert(-", "3"),  # flattened before a ReLU, or behind it
    ("if self.stack > ", "2"),  # a stack is 4 or 1
    ("if end > max(", "1"),  # a file is not written for a single row
    ("log_prob.argmax(", "+"),  # axis 1 of two is the last
    ("int(torch.randint(2", "*"),  # which games are played, and in the next two lines
    ("int(torch.randint(", "3"),
    ("int(torch.randint(2**", "31"),
    ("np.zeros_like(action), ", "1.0"),  # log b of a final row, from which no step is taken
    ("retrace(zero, zero, reward, args.gamma ", "/"),  # times one, or over it
    ("vector_to_parameters(flat ", "*"),  # one worker here; tests/run has several
]
# what only several processes show, and the training loop: tests/run
NOT_HERE = ["main", "together", "gather", "broadcast"]


def parts(text):
    """The functions and classes between the two banners."""
    first, last = (text[: text.index(banner)].count("\n") for banner in SECTIONS)
    inside = [node for node in ast.parse(text).body if first < node.lineno <= last]
    return [node for node in inside if isinstance(node, (ast.FunctionDef, ast.ClassDef))]


class Changes(ast.NodeVisitor):
    """All (line, column, old, new) of a piece of a script; positions count bytes, as ast does."""

    def __init__(self, text):
        self.lines, self.found, self.names = text.encode().splitlines(keepends=True), [], set()

    def change(self, line, column, old, new):
        assert self.lines[line - 1][column : column + len(old)].decode() == old, (line, column, old)
        self.found.append((line, column, old, new))

    def between(self, left, right, old, new):
        """Where the operator stands between two operands on one line, maybe with brackets."""
        if left.end_lineno == right.lineno:
            gap = self.lines[left.end_lineno - 1][left.end_col_offset : right.col_offset].decode()
            self.change(left.end_lineno, left.end_col_offset + gap.index(old), old, new)

    def visit_FunctionDef(self, node):
        self.names = {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
        self.names |= {argument.arg for argument in node.args.args}
        for statement in node.body:  # neither the defaults, nor the docstring
            if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
                self.visit(statement)

    def visit_BinOp(self, node):
        if type(node.op) in OPERATORS:
            self.between(node.left, node.right, SIGNS[type(node.op)], OPERATORS[type(node.op)])
        self.generic_visit(node)

    def visit_BoolOp(self, node):
        old = SIGNS[type(node.op)]
        self.between(node.values[0], node.values[1], old, "or" if old == "and" else "and")
        self.generic_visit(node)

    def visit_UnaryOp(self, node):
        sign = {ast.USub: "-", ast.Invert: "~", ast.Not: "not "}[type(node.op)]
        self.change(node.lineno, node.col_offset, sign, "" if sign != "-" else "+")
        self.generic_visit(node)

    def visit_Compare(self, node):
        if type(node.ops[0]) in COMPARED:
            self.between(node.left, node.comparators[0], *COMPARED[type(node.ops[0])])
        self.generic_visit(node)

    def visit_Constant(self, node):
        old = self.lines[node.lineno - 1][node.col_offset : node.end_col_offset].decode()
        if isinstance(node.value, bool):
            self.change(node.lineno, node.col_offset, old, str(not node.value))
        elif isinstance(node.value, (int, float)):
            self.change(
                node.lineno,
                node.col_offset,
                old,
                str(node.value + 1 if node.value == int(node.value) else 2 * node.value),
            )

    def visit_Call(self, node):
        if getattr(node.func, "attr", "") in (
            "squeeze",
            "unsqueeze",
        ):  # an axis counted from the front may be the same
            self.visit(node.func)
        else:
            self.generic_visit(node)

    def visit_Attribute(self, node):
        line, column = node.end_lineno, node.end_col_offset - len(node.attr)
        if node.attr in OTHER_NAME:
            self.change(line, column, node.attr, OTHER_NAME[node.attr])
        if other := OTHER_PART.get(node.attr):
            self.change(line, column, node.attr, other)
        tail = self.lines[line - 1][column:].decode()
        call = "" if node.attr == "mT" else "()"
        if node.attr in DROPPED and tail.startswith(node.attr + call):
            self.change(line, column - 1, f".{node.attr}{call}", "")
        self.visit(node.value)

    def visit_keyword(self, node):
        if node.arg in OTHER_NAME:
            self.change(node.lineno, node.col_offset, node.arg, OTHER_NAME[node.arg])
        self.visit(node.value)

    def visit_Name(self, node):
        other = node.id.removesuffix("_i") if node.id.endswith("_i") else f"{node.id}_i"
        other = OTHER_PART.get(node.id, other)
        if isinstance(node.ctx, ast.Load) and other in self.names:
            self.change(node.lineno, node.col_offset, node.id, other)


def changes(text, names):
    """The changes to the parts of these names; all parts, if there are none."""
    finder = Changes(text)
    for part in parts(text):
        if not names or part.name in names:
            finder.visit(part)
    return finder.found


def changed(text, line, column, old, new):
    lines = text.encode().splitlines(keepends=True)
    lines[line - 1] = lines[line - 1][:column] + new.encode() + lines[line - 1][column + len(old) :]
    return b"".join(lines).decode()


def survives(name, text):
    """Whether the tests pass with this text as the script. In a fork: this process stays as is."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    failed = 1
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (PATIENCE, PATIENCE))
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1), os.dup2(nowhere, 2)
        origin = str(HERE.parent / f"{name}.py")
        spec = importlib.util.spec_from_loader(name, loader=None, origin=origin)
        script = sys.modules[name] = importlib.util.module_from_spec(spec)
        script.__file__ = origin
        exec(compile(text, origin, "exec"), script.__dict__)
        own = HERE / "math" / f"test_{name.removeprefix('mpo_')}.py"
        files = [str(HERE / "math" / f"test_{file}.py") for file in FILES]
        files = [str(own), *files] if own.exists() else files
        apart, lived = (" or ".join(names.split()) for names in (APART, LIVED))
        chosen = f"({name} or {own.stem} or test_games and ({lived})) and not ({apart})"
        files += [str(HERE / "run/test_games.py")] if name == "mpo_atari" else []
        options = ["-n", "0", "-x", "-p", "no:cacheprovider", "-k", chosen]
        failed = pytest.main([*options, *files])
    finally:
        os._exit(min(int(failed), 1))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("script", nargs="?", default=SCRIPTS[0], choices=SCRIPTS)
    parser.add_argument("parts", nargs="*", help="functions and classes to change; none: all")
    parser.add_argument("--list", action="store_true", help="only list the changes")
    args = parser.parse_args()
    texts = {name: (HERE.parent / f"{name}.py").read_text() for name in SCRIPTS}
    text = texts[args.script]
    earlier = [texts[name] for name in SCRIPTS[: SCRIPTS.index(args.script)]]
    names = args.parts or [
        part.name
        for part in parts(text)
        if part.name not in NOT_HERE
        and not any(ast.get_source_segment(text, part) in other for other in earlier)
    ]
    found, noticed, same, started = changes(text, names), 0, 0, time.time()
    torch.set_num_threads(1)  # a fork has one thread
    sys.path.insert(0, str(HERE.parent))
    for name in (*SCRIPTS, *SLOW_IMPORTS):  # once, for all forks
        importlib.import_module(name)
    if not args.list and not survives(args.script, text):
        sys.exit("the tests fail without any change")
    for number, (line, column, old, new) in enumerate(found, 1):
        whole = text.splitlines()[line - 1]
        before = whole[:column]
        what = f"{args.script}.py:{line}: {old!r} -> {new!r} in {whole.strip()}"
        if args.list:
            print(what)
        elif any(before.endswith(piece) and new == known for piece, known in SAME):
            same += 1
        elif survives(args.script, changed(text, line, column, old, new)):
            print(f"not noticed: {what}", flush=True)
        else:
            noticed += 1
        if not args.list and sys.stdout.isatty():
            left = (time.time() - started) / number * (len(found) - number)
            words = f"{number} of {len(found)}, {left / 60:.0f} min left"
            print(f"\r\033[K{words}", end="\r", flush=True)
    if args.list:
        return print(f"{len(found)} changes")
    survivors = len(found) - noticed - same
    print(f"{len(found)} changes: {noticed} noticed, {same} make no difference, {survivors} not")
    sys.exit(int(survivors > 0))


if __name__ == "__main__":
    main()
