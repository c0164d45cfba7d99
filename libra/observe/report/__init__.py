"""`libra report`: one HTML file of one run or several, which needs nothing but a browser.

1. The file makes no request: scripts and styles are in it.
2. A part without data is a sentence that says why, never an empty frame.
3. What models, tools and users wrote reaches the page through the templates of `libra.observe.html` only.
4. The numbers of worker time are those of `libra.observe.timeline.states`, as on the live page.
"""

from __future__ import annotations

from libra.observe.report.page import write_report

__all__ = ["write_report"]
