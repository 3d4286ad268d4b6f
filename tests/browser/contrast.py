"""Is every text readable on what is really behind it?"""

from __future__ import annotations

from playwright.sync_api import Locator

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
