"""The tutorial's committed pages in headless Chromium, where it is installed with its driver."""

import json
import shutil
from pathlib import Path

import pytest

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
from selenium.common.exceptions import TimeoutException  # noqa: E402
from selenium.webdriver.chrome.service import Service  # noqa: E402

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = sorted(path.stem for path in DOCS.glob("*.html"))
BROWSER = next(
    filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome"])), None
)
DRIVER = shutil.which("chromedriver")
FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync
--disable-background-networking --disable-component-update --hide-scrollbars"""

pytestmark = [
    pytest.mark.skipif(not BROWSER or not DRIVER, reason="no chromium and chromedriver here"),
    pytest.mark.parametrize("page", PAGES, scope="module"),  # all tests of a page together
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in [*FLAGS.split(), f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = Service(DRIVER)  # its path: nothing is fetched
    driver = webdriver.Chrome(options=options, service=service)
    for _ in range(3):  # the browser's own first page, still loading, may cut in
        try:
            driver.get("about:blank")
            break
        except TimeoutException:
            continue
    yield driver
    driver.quit()


def show(browser, page, width, dark=False):
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    address = (DOCS / f"{page}.html").as_uri()
    if browser.current_url != address:
        browser.get(address)


def test_the_console_is_silent_and_every_request_is_for_a_file(browser, page):
    browser.get_log("browser"), browser.get_log("performance")
    show(browser, page, 1280)
    browser.refresh()
    browser.execute_script("document.querySelectorAll('img').forEach(x => x.loading = 'eager')")
    broken = """const images = [...document.images];
        return Promise.all(images.map(x => x.decode().then(() => null, () => x.src)))"""
    assert list(filter(None, browser.execute_script(broken))) == []
    assert browser.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    requests = [x["params"] for x in events if x["method"] == "Network.requestWillBeSent"]
    # the browser's own first page, and what is inside it, asks for things too
    own = ("chrome:", "chrome-untrusted:")
    sent = [x["request"]["url"] for x in requests if not x["documentURL"].startswith(own)]
    assert any(url.endswith("style.css") for url in sent)
    assert [url for url in sent if not url.startswith(("file:", "data:"))] == []


def test_every_anchor_of_the_page_resolves(browser, page):
    show(browser, page, 1280)
    missing = browser.execute_script(
        """return [...document.querySelectorAll('a[href^="#"]')].map(x => x.getAttribute('href'))
        .filter(x => !document.getElementById(x.slice(1)))"""
    )
    assert missing == []


@pytest.mark.parametrize("width", [390, 1280])
def test_every_formula_and_picture_has_a_size(browser, page, width):
    show(browser, page, width)
    found = browser.execute_script(
        """const found = [...document.querySelectorAll('math, img')];
        const small = found.filter(x => {
            const box = x.getBoundingClientRect();
            return box.width < 4 || box.height < 6;
        });
        return [found.length, small.map(x => x.outerHTML)]"""
    )
    assert found[0] > 0 or page == "tests"
    assert found[1] == []


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_overflows_the_window_but_what_scrolls_by_itself(browser, page, width):
    show(browser, page, width)
    over = browser.execute_script(
        """const wide = document.documentElement.clientWidth, over = [];
        const scrolls = x => x && (['auto', 'scroll'].includes(getComputedStyle(x).overflowX)
            || scrolls(x.parentElement));
        for (const x of document.body.querySelectorAll('*')) {
            const box = x.getBoundingClientRect();
            const outside = box.right > wide + 1 || box.left < -1;
            if (outside && !scrolls(x.parentElement)) over.push(x.outerHTML);
        }
        return [wide, document.documentElement.scrollWidth, over.map(x => x.slice(0, 200))]"""
    )
    assert over == [width, width, []]


def test_code_stands_beside_its_text_on_a_screen_and_below_it_on_a_phone(browser, page):
    beside = {}
    for width in (390, 1280):
        show(browser, page, width)
        beside[width] = browser.execute_script(
            """return [...document.querySelectorAll('.row')].map(x => {
                const [text, code] = [...x.children].map(y => y.getBoundingClientRect());
                return text.right <= code.left;
            })"""
        )
    assert all(beside[1280]) and not any(beside[390])
    assert len(beside[1280]) > 5 or page in ("index", "tests")


def test_it_is_dark_where_the_reader_has_it_dark(browser, page):
    light = {}
    for dark in (False, True):
        show(browser, page, 1280, dark)
        colours = browser.execute_script(
            "const x = getComputedStyle(document.body); return [x.backgroundColor, x.color]"
        )
        light[dark] = [sum(map(int, x.strip("rgb()").split(","))) / 3 for x in colours]
    assert light[False][0] > 240 and light[False][1] < 60
    assert light[True][0] < 40 and light[True][1] > 200


def test_the_contents_follow_the_reading(browser, page):
    show(browser, page, 1280)
    top = """window.scrollTo(0, document.body.scrollHeight);
        return document.querySelector('.contents').getBoundingClientRect().top"""
    assert 0 <= browser.execute_script(top) < 100
