"""Build the tutorial: docs/*.html and docs/img/*.svg, from the scripts and docs/text.

    python docs/build.py     builds everything anew; open docs/index.html

A script's page has its code, cut at the banner comments and at each function, and beside it what
docs/text/functions.md says of that function. A function without an entry there, an entry without a
function, a test or a line of code that is named and does not exist: each is a complaint, and the
exit code is 1.
"""

import ast
import html
import re
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import markdown
import pictures
from latex2mathml.converter import convert
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
PAPER = "https://arxiv.org/abs/1806.06920"
ORDER = ["mpo_continuous", "mpo_parametric", "mpo_atari", "mpo_distributed"]
PLUMBING = "# ==== "


# ---- The scripts: sections, functions, and the parts of long functions
class Chunk(NamedTuple):
    name: str  # of the function or class
    line: int  # number of its first line
    source: str


class Section(NamedTuple):
    title: str
    chunks: list


def scripts():
    """The scripts of the project by name, in the order of reading."""
    found = {path.stem for path in ROOT.glob("mpo_*.py")}
    return {
        name: ROOT / f"{name}.py" for name in sorted(found, key=lambda x: (ORDER + [x]).index(x))
    }


@cache
def sections(path):
    """The sections of a script before its plumbing; the first is its usage card."""
    text = path.read_text()
    lines = text.splitlines()
    ends = [n for n, line in enumerate(lines) if line.startswith(PLUMBING)]
    end = ends[0] if ends else len(lines)
    banners = [n for n, line in enumerate(lines[:end]) if line.startswith("# ---- ")]
    tree = ast.parse(text)
    card = Chunk("usage", 1, "\n".join(lines[: tree.body[0].end_lineno]))
    result = [Section("Usage", [card])]
    for start, stop in zip(banners, [*banners[1:], end]):
        title = re.match(r"[^.:]+", lines[start].removeprefix("# ---- "))[0]
        firsts = []  # of each function: its line, or that of the comment or decorator above it
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and start < node.lineno <= stop:
                first = min([node.lineno, *(x.lineno for x in node.decorator_list)]) - 1
                while lines[first - 1].startswith("#") and first - 1 > start:
                    first -= 1
                firsts.append((first, node.name))
        starts = [start] + [first for first, _ in firsts[1:]]
        chunks = []
        for (_, name), a, b in zip(firsts, starts, [*starts[1:], stop]):
            chunks.append(Chunk(name, a + 1, "\n".join(lines[a:b]).rstrip()))
        result.append(Section(title, chunks))
    return result


def divide(chunk, needles):
    """A long function in parts: each begins with a paragraph that has one of the needles in it."""
    paragraphs, parts = chunk.source.split("\n\n"), []
    line = chunk.line
    for paragraph in paragraphs:
        found = [needle for needle in needles if needle in paragraph]
        if parts and not found:
            parts[-1] = (
                parts[-1][0],
                parts[-1][1]._replace(source=f"{parts[-1][1].source}\n\n{paragraph}"),
            )
        else:
            parts.append((found, Chunk(chunk.name, line, paragraph)))
        line += paragraph.count("\n") + 2
    return parts


# ---- The text: Markdown with formulas between dollars, and "- key: value" lines under a heading
class Entry(NamedTuple):
    title: str
    facts: dict  # paper, tests, printed, why, ...
    body: str
    parts: dict  # of a long function: Entry by a word of the code


@cache
def entries(path):
    """What a file says under each heading of level 2, with those of level 3 as parts."""
    result = {}
    for block in re.split(r"^## ", path.read_text(), flags=re.MULTILINE)[1:]:
        head, *others = re.split(r"^### ", block, flags=re.MULTILINE)
        key, entry = parse(head)
        parts = dict(parse(other) for other in others)
        assert key not in result, f"two entries for {key}"
        result[key] = entry._replace(parts=parts)
    return result


def parse(block):
    heading, _, rest = block.partition("\n")
    key, _, title = heading.partition(": ")
    key = key.strip("`") if title or "`" not in heading else heading.strip("`")
    facts = dict(re.findall(r"^- (\w+): (.*)$", rest, flags=re.MULTILINE))
    body = re.sub(r"^- \w+: .*\n?", "", rest, flags=re.MULTILINE).strip()
    return key, Entry(title, facts, body, {})


def entry_of(script, name):
    """A script's own entry for a function, or else that for all scripts."""
    found = entries(DOCS / "text/functions.md")
    return found.get(f"{script}.{name}") or found.get(name)


@cache
def formula(latex, display):
    """MathML, mended: limits below max, space after the name of a function, primes of full size."""
    math = convert(latex, display="block" if display else "inline")
    argument = r"(<mi>[^<]*</mi>|<mrow>(?:(?!<mrow>).)*?</mrow>)"
    math = re.sub(rf"<msub>(<mo>(?:max|min)</mo>){argument}</msub>", r"<munder>\1\2</munder>", math)
    math = re.sub(
        r"(<mi>(?:log|exp|ln)</mi>)(?!</?m(?:row|o)\b)", r'\1<mspace width="0.17em"/>', math
    )
    math = re.sub(
        r"<mo[^>]*>(?:det|tr)</mo>", lambda name: f'{name[0]}<mspace width="0.17em"/>', math
    )
    prime = r'<mrow>\1<mo lspace="0" rspace="0">&#x02032;</mo></mrow>'
    return re.sub(r"<msup>(<mi>[^<]*</mi>)<mi>&#x02032;</mi></msup>", prime, math)


def render(text):
    """Markdown to HTML, formulas to MathML."""
    formulas = []

    def keep(match):
        display = match[1] is not None
        math = formula((match[1] or match[2]).strip(), display)
        formulas.append(f'<div class="formula">{math}</div>' if display else math)
        return f"FORMULA{len(formulas) - 1}END"

    text = re.sub(r"\$\$(.+?)\$\$|\$(.+?)\$", keep, text, flags=re.DOTALL)
    text = text.replace("](../", "](")  # links in docs/text are relative to it, pages are one up
    page = markdown.markdown(text, extensions=["tables"])
    page = re.sub(r"<p>(FORMULA\d+END)</p>", r"\1", page)
    page = page.replace("<table>", '<div class="table"><table>').replace(
        "</table>", "</table></div>"
    )
    return re.sub(r"FORMULA(\d+)END", lambda match: formulas[int(match[1])], page)


# ---- The tests that the text names
@cache
def all_tests():
    """Name to {file: source} of every test of the project."""
    found = {}
    for path in sorted(ROOT.glob("tests/**/test_*.py")):
        text = path.read_text()
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                first = min([node.lineno, *(x.lineno for x in node.decorator_list)])
                source = "\n".join(text.splitlines()[first - 1 : node.end_lineno])
                found.setdefault(node.name, {})[path.relative_to(ROOT)] = source
    return found


def find_test(name):
    """File and source of a test: its name without test_, after FILE:: if several files have it."""
    stem, _, name = name.rpartition("::")
    files = all_tests().get(f"test_{name}", {})
    files = {
        path: source
        for path, source in files.items()
        if stem in ("", path.stem.removeprefix("test_"))
    }
    math = {path: source for path, source in files.items() if "math" in path.parts}
    return next(iter((math or files).items()), None)


def test_names(entry):
    return [name.strip(" `") for name in entry.facts.get("tests", "").split(",") if name.strip()]


def linked_tests():
    """The tests that any entry names, in order."""
    names, texts = [], [entries(DOCS / f"text/{name}.md") for name in ("functions", "pictures")]
    for entry in [entry for text in texts for entry in text.values()]:
        for part in [entry, *entry.parts.values()]:
            names += test_names(part)
    return list(dict.fromkeys(names))


# ---- What is wrong
def complaints():
    """A sentence for each function, entry, line or test that one names and the other lacks."""
    found, used = [], set()
    for script, path in scripts().items():
        for section in sections(path):
            for chunk in section.chunks:
                entry = entry_of(script, chunk.name)
                if entry is None:
                    found.append(f"{script}.{chunk.name} has no entry in docs/text/functions.md")
                    continue
                own = f"{script}.{chunk.name}"
                used.add(own if own in entries(DOCS / "text/functions.md") else chunk.name)
                for needle in entry.parts:
                    if needle not in chunk.source:
                        found.append(
                            f"{own} has no `{needle}`, of which docs/text/functions.md speaks"
                        )
    for key, entry in entries(DOCS / "text/functions.md").items():
        if key not in used:
            found.append(f"docs/text/functions.md speaks of {key}, which no script has")
        for part in [entry, *entry.parts.values()]:
            if "$$" in part.body and not (part.facts.get("paper") and test_names(part)):
                found.append(f"a formula of {key} names no equation of the paper, or no test")
    found += [f"there is no test {name}" for name in linked_tests() if find_test(name) is None]
    for key in entries(DOCS / "text/pictures.md"):
        if key not in pictures.FIGURES:
            found.append(
                f"docs/text/pictures.md speaks of {key}, which docs/pictures.py does not draw"
            )
    for key in pictures.FIGURES:
        if key not in entries(DOCS / "text/pictures.md"):
            found.append(f"the figure {key} has no entry in docs/text/pictures.md")
    return found


# ---- The pages
def code(source, line=None):
    """Highlighted code, with line numbers that are not copied with it."""
    shown = (
        highlight(source, PythonLexer(stripnl=False), HtmlFormatter(nowrap=True))
        .rstrip("\n")
        .split("\n")
    )
    if line is None:
        return f'<pre class="code" tabindex="0"><code>{chr(10).join(shown)}</code></pre>'
    numbered = [
        f'<span class="line" data-n="{line + n}"></span>{text}' for n, text in enumerate(shown)
    ]
    return f'<pre class="code" tabindex="0"><code>{chr(10).join(numbered)}</code></pre>'


def explanation(entry):
    """What stands beside the code: prose, formulas, the misprint, the paper and the tests."""
    parts = [render(entry.body)] if entry.body else []
    facts = entry.facts
    if "printed" in facts:
        words = render(facts.get("why", "")).removeprefix("<p>").removesuffix("</p>")
        printed = render(f"$${facts['printed'].strip('$')}$$")
        mended = render(f"$${facts['mended'].strip('$')}$$") if "mended" in facts else ""
        mended = f"<b>mended</b>{mended}" if mended else ""
        parts.append(f'<div class="misprint"><b>printed</b>{printed}{mended}<p>{words}</p></div>')
    links = []
    if "paper" in facts:
        links.append(f'paper: <a href="{PAPER}">{html.escape(facts["paper"])}</a>')
    tests = [name for name in test_names(entry) if find_test(name)]
    if tests:
        anchors = [f'<a href="tests.html#{anchor(name)}">{wrap(name)}</a>' for name in tests]
        links.append(f"held by: {', '.join(anchors)}")
    if links:
        parts.append(f'<p class="links">{"<br>".join(links)}</p>')
    return "\n".join(parts)


def anchor(name):
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def wrap(name):
    """The name of a test as words."""
    return html.escape(name.rpartition("::")[2].replace("_", " "))


def page(name, title, contents, body, lead=""):
    """A whole page: the head, the pages' list, the contents column and the body."""
    pages = {"index": "MPO", "pictures": "in pictures"}
    pages |= {script.removeprefix("mpo_"): f"{script}.py" for script in scripts()} | {
        "tests": "tests"
    }
    here = ' aria-current="page"'
    links = [
        f'<a href="{page}.html"{here if page == name else ""}>{text}</a>'
        for page, text in pages.items()
    ]
    inside = []
    for level, key, text in contents:
        inside.append(f'<li class="level{level}"><a href="#{key}">{text}</a></li>')
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="style.css">
</head>
<body class="{name}">
<header><nav aria-label="pages">{" ".join(links)}</nav></header>
<div class="frame">
<nav class="contents" aria-label="contents"><details open><summary>Contents</summary>
<ul>
{chr(10).join(inside)}
</ul></details></nav>
<main>
<h1>{html.escape(title)}</h1>
{lead}
{body}
</main>
</div>
</body>
</html>
"""


def script_page(script, path):
    first = next(iter(scripts()))
    shared = {
        chunk.name: chunk.source
        for section in sections(scripts()[first])
        for chunk in section.chunks
    }
    contents, body = [], []
    for section in sections(path):
        contents.append((1, anchor(section.title), section.title.partition(",")[0]))
        body.append(f'<h2 id="{anchor(section.title)}">{section.title}</h2>')
        for chunk in section.chunks:
            entry = entry_of(script, chunk.name) or Entry("", {}, "", {})
            name = chunk.name
            if name != "usage":
                contents.append((2, name, name))
            same = script != first and without_banner(shared.get(name, "")) == without_banner(
                chunk.source
            )
            there = f"{first.removeprefix('mpo_')}.html#{name}"
            note = f'<a class="same" href="{there}">as in {first}.py</a>'
            for number, (needles, part) in enumerate(divide(chunk, list(entry.parts))):
                said = [explanation(entry)] if number == 0 else []
                said += [explanation(entry.parts[needle]) for needle in needles]
                head = (
                    f"<h3>{name} {note if same else ''}</h3>"
                    if number == 0 and name != "usage"
                    else ""
                )
                key = f' id="{name}"' if number == 0 and name != "usage" else ""
                words = "\n".join(said)
                body.append(f'<section class="row"{key}><div class="text">{head}{words}</div>')
                body.append(f"{code(part.source, part.line)}</section>")
    lead = render(entry_text(f"{script}.page"))
    return page(script.removeprefix("mpo_"), f"{script}.py", contents, "\n".join(body), lead)


def without_banner(source):
    return re.sub(r"\A# ---- .*\n(#.*\n)*", "", source)


def entry_text(key):
    """What docs/text/pages.md has for the head of a page."""
    found = entries(DOCS / "text/pages.md").get(key)
    return found.body if found else ""


def pictures_page(files):
    contents, body = [], []
    for number, (name, entry) in enumerate(entries(DOCS / "text/pictures.md").items(), start=1):
        contents.append((1, anchor(name), entry.title))
        body.append(f'<h2 id="{anchor(name)}">{number}. {entry.title}</h2>')
        images = []
        for panel, path in enumerate(files[name], start=1):
            width, height = re.search(
                r'width="([\d.]+)pt" height="([\d.]+)pt"', path.read_text()
            ).groups()
            size = f'width="{float(width) * 4 / 3:.0f}" height="{float(height) * 4 / 3:.0f}"'
            alt = f"{entry.title}, panel {panel}"
            images.append(
                f'<img src="img/{path.name}" alt="{html.escape(alt)}" {size} loading="lazy">'
            )
        body.append(f'<figure class="panels">{"".join(images)}</figure>')
        source = "\n\n\n".join(
            source_of(x.strip(" `")) for x in entry.facts.get("code", name).split(",")
        )
        words = f'<div class="text">{explanation(entry)}</div>'
        body.append(f'<section class="row">{words}{code(source)}</section>')
    lead = render(entry_text("pictures.page"))
    return page("pictures", "MPO in pictures", contents, "\n".join(body), lead)


def source_of(name):
    path = DOCS / "pictures.py"
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            source = "\n".join(path.read_text().splitlines()[node.lineno - 1 : node.end_lineno])
            return re.sub(r"  # noqa: \w+", "", source)
    raise KeyError(f"docs/pictures.py has no {name}")


def index_page():
    text = (DOCS / "text/index.md").read_text()
    title, _, text = text.removeprefix("# ").partition("\n")
    contents, body = [], render(text)
    for heading in re.findall(r"<h2>(.*?)</h2>", body):
        key = anchor(re.sub(r"<.*?>", "", heading))
        contents.append((1, key, heading))
        body = body.replace(f"<h2>{heading}</h2>", f'<h2 id="{key}">{heading}</h2>')
    return page("index", title, contents, body)


def tests_page():
    by_file = {}
    for name in linked_tests():
        if find_test(name):
            path, source = find_test(name)
            by_file.setdefault(path, {})[name] = source
    contents, body = [], []
    for path, tests in by_file.items():
        contents.append(
            (1, anchor(str(path)), f"{path.parent.name}/{path.stem.removeprefix('test_')}")
        )
        body.append(f'<h2 id="{anchor(str(path))}">{path}</h2>')
        for name, source in tests.items():
            body.append(f'<h3 id="{anchor(name)}">{wrap(name)}</h3>{code(source)}')
    lead = render(entry_text("tests.page"))
    return page("tests", "The tests that hold the formulas", contents, "\n".join(body), lead)


def build(folder):
    """Write the pages and figures to a folder; returns their names."""
    files = pictures.draw(folder / "img")
    pages = {"index": index_page(), "pictures": pictures_page(files), "tests": tests_page()}
    pages |= {
        script.removeprefix("mpo_"): script_page(script, path) for script, path in scripts().items()
    }
    for name, content in pages.items():
        (folder / f"{name}.html").write_text(content)
    return list(pages)


if __name__ == "__main__":
    for name in build(DOCS):
        path = DOCS / f"{name}.html"
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} KB")
    found = complaints()
    sys.exit("\n".join(found) if found else 0)
