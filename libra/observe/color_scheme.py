"""Light and dark of the live page and of reports: the colours, and the script that brings them into canvases.

The scheme is the browser's. ``?theme=dark`` or ``?theme=light`` in the address chooses one, and so does the switch of a page that
has one (an element with the id ``theme``); its choice is remembered in the browser.
"""

from __future__ import annotations

from typing import Final

_LIGHT: Final = (
    "color-scheme: light; --back: #f6f7f8; --card: #fff; --text: #1f2a30; --soft: #5a6a73; --line: #dde2e5; --bad: #b3261e; "
    "--code: #f1f3f4; --mark: #eaf1f8;"
)
_DARK: Final = (
    "color-scheme: dark; --back: #12171b; --card: #1b2228; --text: #e3e8ea; --soft: #9fb0b9; --line: #333d44; --bad: #ff8a80; "
    "--code: #141a1f; --mark: #24323d;"
)
COLORS: Final = (
    f":root {{ {_LIGHT} }}\n"
    f"@media (prefers-color-scheme: dark) {{ :root:not([data-theme=light]) {{ {_DARK} }} }}\n"
    f":root[data-theme=dark] {{ {_DARK} }}\n"
)
"""CSS variables of both schemes."""

SCRIPT: Final = """
(() => {
  const root = document.documentElement, dark = window.matchMedia('(prefers-color-scheme: dark)');
  const asked = new URLSearchParams(location.search).get('theme');
  const remembered = () => { try { return localStorage.getItem('libra-theme'); } catch (_) { return null; } };
  const choose = (theme) => { if (['light', 'dark'].includes(theme)) root.dataset.theme = theme; };
  choose(asked || remembered());
  const paint = () => {
    const css = getComputedStyle(root);
    const [ink, soft, line] = ['--text', '--soft', '--line'].map((name) => css.getPropertyValue(name).trim());
    const colors = (model) =>
      /Axis$/.test(model.type)
        ? {major_label_text_color: soft, axis_label_text_color: soft, axis_line_color: line, major_tick_line_color: line}
      : model.type === 'Grid' ? {grid_line_color: line}
      : model.type === 'Title' ? {text_color: ink}
      : model.type === 'Legend' ? {label_text_color: soft} : null;
    for (const doc of Bokeh.documents)
      for (const model of doc._all_models.values()) {
        const changed = colors(model);
        if (changed) model.setv(changed, {sync: false});
      }
  };
  const begin = () => {
    if (!window.Bokeh || !Bokeh.documents.length) return setTimeout(begin, 20);
    paint();
    root.dataset.painted = '1';
  };
  begin();
  dark.addEventListener('change', paint);
  document.addEventListener('click', (event) => {
    if (event.target.id !== 'theme') return;
    choose((root.dataset.theme || (dark.matches ? 'dark' : 'light')) === 'dark' ? 'light' : 'dark');
    try { localStorage.setItem('libra-theme', root.dataset.theme); } catch (_) { /* not remembered */ }
    paint();
  });
})();
"""
"""Gives texts and grids of Bokeh's canvases the colours of the page, now and when the scheme changes."""
