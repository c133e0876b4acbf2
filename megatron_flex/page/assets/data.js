'use strict';
/* The data pane: sources, iterations and views; each view draws itself anew when what is chosen changes. */
(() => {
  const { el, page, select } = flexPage;

  function make(root) {
    const tools = flexPage.dataTools;
    const { all: sources, nearest } = flexSources;
    const views = (flexPage.dataViews || []).filter((v) => !v.available || v.available(page))
      .sort((a, b) => a.order - b.order);
    if (!sources.length && !page.divergence) {
      root.append(tools.sentence('This page was made without a dump or statistics. To see tensors here, write some '
        + '(mf.attach(model, dumps=mf.Dump(folder, ["decoder.layers.*"]))) and view that folder.'));
      return { update() {} };
    }
    const local = {}, ctx = { page, sources, local, state: flexPage.state, both: false };
    let view = page.divergence ? 'divergence' : flexPage.state.site === null ? 'norms' : 'site', mine = false, begun = false;
    const bar = el('div', { class: 'data-bar-top' }), notes = el('div', { class: 'data-notes' });
    const tabs = el('div', { class: 'data-tabs', role: 'tablist', 'aria-label': 'views of the data' });
    const body = el('div', { class: 'data-body', role: 'tabpanel', id: 'data-body' });
    root.append(bar, tabs, notes, body);
    ctx.choose = (change) => { mine = true; try { select(change); } finally { mine = false; } };
    ctx.iterate = (iteration) => ctx.choose({ iteration });
    ctx.redraw = (key) => draw(key);

    function toolbar() {
      bar.replaceChildren();
      const { source } = ctx;
      if (sources.length > 1) {
        const options = sources.map((s, i) => ({ value: i, text: s.label }));
        options.push({ value: 'both', text: 'A and B' });
        bar.append(tools.choice('source', options, ctx.both ? 'both' : ctx.state.source, (value) => {
          ctx.both = value === 'both';
          if (!ctx.both && value !== ctx.state.source) ctx.choose({ source: value });
          else draw();
        }, 'source'));
      }
      if (source) bar.append(el('span', { class: 'data-words' }, source.words));
      if (source && source.iterations.length > 1) {
        const slider = el('input', { type: 'range', min: '0', max: String(source.iterations.length - 1), step: '1',
          value: String(source.at), 'aria-label': 'iteration',
          'aria-valuetext': `iteration ${source.iterations[source.at]}` });
        slider.value = String(source.at);
        slider.dataset.key = 'iteration';
        slider.addEventListener('input', () => ctx.iterate(source.iterations[Number(slider.value)]));
        bar.append(el('label', { class: 'data-slider' }, `iteration ${source.iterations[source.at]}`, slider));
      } else if (source && source.iterations.length) {
        bar.append(el('span', { class: 'data-dim' }, `iteration ${source.iterations[0]}`));
      }
    }

    function tabbing() {
      tabs.replaceChildren(...views.map((one) => {
        const on = one.id === view;
        const tab = el('button', { type: 'button', role: 'tab', id: `data-tab-${one.id}`, 'aria-selected': String(on),
          'aria-controls': 'data-body', tabindex: on ? '0' : '-1' }, one.title);
        tab.dataset.key = `tab ${one.id}`;
        tab.addEventListener('click', () => { view = one.id; draw(`tab ${one.id}`); });
        return tab;
      }));
    }
    tabs.addEventListener('keydown', (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      event.stopPropagation();
      view = views[(views.findIndex((v) => v.id === view) + step + views.length) % views.length].id;
      draw(`tab ${view}`);
    });

    function noting() {
      const above = new Set(page.notes.map((n) => n.text)); // the head of the page has these
      const told = (ctx.both ? sources : [ctx.source]).filter(Boolean).flatMap((s) => s.notes)
        .filter((n) => !above.has(n.text));
      const bad = told.filter((n) => n.kind === 'damage'), rest = told.filter((n) => n.kind !== 'damage');
      const open = notes.querySelector('details')?.open;
      notes.replaceChildren(...bad.map((n) => el('p', { class: 'data-damage', role: 'alert' }, n.text)));
      if (rest.length) {
        const more = el('details', {}, el('summary', {}, `${rest.length} note${rest.length > 1 ? "s" : ""} on what is shown`),
          ...rest.map((n) => el('p', { class: 'data-dim' }, n.text)));
        more.open = Boolean(open);
        notes.append(more);
      }
    }

    function draw(key) {
      const held = key || (root.contains(document.activeElement) ? document.activeElement.dataset.key : null);
      const top = body.scrollTop;
      ctx.source = sources[ctx.state.source] || sources[0];
      for (const source of sources) source.at = nearest(source, ctx.state.iteration);
      toolbar();
      tabbing();
      noting();
      body.replaceChildren();
      tools.measure(body.clientWidth, ctx.both);
      body.setAttribute('aria-labelledby', `data-tab-${view}`);
      body.dataset.view = view;
      const found = views.find((one) => one.id === view) || views[0];
      if (!ctx.source && found.id !== 'divergence') body.append(tools.sentence('There is no dump to show.'));
      else found.draw(body, ctx);
      body.scrollTop = top;
      if (held) {
        const again = [...root.querySelectorAll('[data-key]')].find((node) => node.dataset.key === held);
        if (again) again.focus({ preventScroll: true });
      }
    }

    let shade = tools.isDark();
    const themed = () => { if (tools.isDark() !== shade) { shade = !shade; draw(); } };
    matchMedia('(prefers-color-scheme: dark)').addEventListener('change', themed);
    new MutationObserver(themed).observe(document.documentElement, { attributes: true });
    let wide = 0; // charts are as wide as there is room, so that their letters have one size
    new ResizeObserver(() => { if (body.clientWidth && body.clientWidth !== wide) { wide = body.clientWidth; draw(); } }).observe(body);
    draw();
    return {
      update(state, changed) {
        const has = (name) => !changed || changed.has(name);
        if (!['site', 'layer', 'source', 'iteration'].some(has)) return;
        if (has('source')) ctx.both = ctx.both && mine;
        if (has('site') && !mine && begun && state.site !== null) view = 'site'; // what it opens with is shown already
        begun = true;
        draw();
      },
    };
  }

  flexPage.pane('data', { title: 'Data', make });
})();
