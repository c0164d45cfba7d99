// Gives texts and grids of Bokeh's canvases the colours of the page, now and when the scheme changes. The scheme is the browser's;
// ?theme=dark or light in the address chooses one, and so does an element with the id "theme", whose choice is remembered.
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
