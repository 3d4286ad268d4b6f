"""Is every text readable on what is really behind it, and can all be reached by those who use no mouse?"""

from __future__ import annotations

from importlib.resources import files

from playwright.sync_api import Locator, Page

_AXE = files("axe_playwright_python") / "axe.min.js"

# WCAG 2.1's contrast ratio (1.4.3): colours are painted on a canvas, so that any CSS notation is understood, and the
# background is composed from all ancestors up to the page.
_MEASURE = """root => {
  const context = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const pixel = colours => {
    context.clearRect(0, 0, 1, 1);
    for (const colour of colours) { context.fillStyle = colour; context.fillRect(0, 0, 1, 1); }
    return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const luminance = rgb => {
    const [r, g, b] = rgb.map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = [];
  for (const element of [root, ...root.querySelectorAll('*')]) {
    const text = [...element.childNodes].filter(node => node.nodeType === 3).map(node => node.data.trim()).join(' ');
    if (!text.trim() || !element.checkVisibility() || element.closest('style, title, desc, .remat-hidden')) continue;
    const backgrounds = [];
    for (let up = element; up; up = up.parentElement) backgrounds.unshift(getComputedStyle(up).backgroundColor);
    const behind = ['white', ...backgrounds];
    const style = getComputedStyle(element);
    const painted = element instanceof SVGElement ? style.fill : style.color;
    const [a, b] = [luminance(pixel(behind)), luminance(pixel([...behind, painted]))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    found.push({ text: text.trim().slice(0, 60), element: element.outerHTML.slice(0, 80), ratio });
  }
  return found;
}"""


def unreadable(root: Locator, least: float = 4.5) -> list[str]:
    """The visible texts within an element whose contrast is too low, as sentences.

    Raises:
        AssertionError: if there was no text to measure.
    """
    measured = root.evaluate(_MEASURE)
    assert measured, "no visible text was found"
    return [f"{one['text']!r}: {one['ratio']:.2f} in {one['element']}" for one in measured if one["ratio"] < least]


def violations(page: Page, selector: str) -> list[str]:
    """What axe-core finds wrong within an element, a line each.

    Contrast is not left to it: it gives up on what another element may overlap, and says so where nobody looks.

    Raises:
        AssertionError: it checked hardly anything.
    """
    if not page.evaluate("() => 'axe' in window"):
        page.evaluate(_AXE.read_text(encoding="utf-8"))
    options = {"rules": {"color-contrast": {"enabled": False}}}
    found = page.evaluate("([selector, options]) => axe.run(selector, options)", [selector, options])
    assert len(found["passes"]) > 15
    return [f"{rule['id']}: {node['html'][:200]}" for rule in found["violations"] for node in rule["nodes"]]
