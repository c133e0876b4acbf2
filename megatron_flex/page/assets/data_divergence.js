'use strict';
/* Two dumps side by side: error against tolerance of each site in the order of execution, the first one marked. */
(() => {
  const { el, svg } = flexPage;
  const tools = flexPage.dataTools;
  const { number, sentence, head } = tools;
  const FLOOR = 1e-12; // what equal tensors are drawn at

  const above = (row) => row[5] !== '' || !(row[2] <= row[3]);
  const error = (row) => (row[5] ? `${row[5]}` : number(row[2]));

  /** Errors and tolerances of an iteration, on a scale of powers of ten. */
  function curve(ctx, found, rows) {
    const width = tools.room(), height = 220, left = 64, right = 14, top = 10, low = 26;
    const finite = rows.flatMap((r) => [r[2], r[3]]).filter((v) => v !== null && v > 0);
    const lo = Math.floor(Math.log10(Math.max(FLOOR, tools.least(finite.length ? finite : [1e-6])))) - 1;
    const hi = Math.ceil(Math.log10(tools.most(finite.length ? finite : [1]))) + (rows.some((r) => r[5]) ? 1 : 0);
    const x = (i) => left + ((width - left - right) * (i + 0.5)) / rows.length;
    const y = (v) => top + (height - top - low) * (1 - (Math.log10(Math.max(v, 10 ** lo)) - lo) / Math.max(1, hi - lo));
    const root = svg('svg', { width, height, class: 'data-chart', role: 'img',
      'aria-label': 'error and tolerance by tensor, in the order of execution' });
    for (let power = lo; power <= hi; power += Math.max(1, Math.ceil((hi - lo) / 6))) {
      root.append(svg('line', { x1: left, x2: width - right, y1: y(10 ** power), y2: y(10 ** power), class: 'data-grid' }),
        svg('text', { x: left - 6, y: y(10 ** power) + 4, 'text-anchor': 'end' }, power === lo ? '≤ 1e' + lo : `1e${power}`));
    }
    let path = '';
    rows.forEach((r, i) => { path += `${i ? 'L' : 'M'}${x(i).toFixed(1)} ${y(r[3] ?? FLOOR).toFixed(1)}`; });
    root.append(svg('path', { d: path, class: 'data-line data-tolerance' }, svg('title', {}, 'tolerance')));
    rows.forEach((r, i) => {
      const value = r[5] ? 10 ** hi : r[2], first = r.number === found.first_row;
      const dot = svg('circle', { cx: x(i), cy: y(value), r: first ? 6 : rows.length > 200 ? 1.8 : 3,
        class: `${above(r) ? 'data-dot data-above' : 'data-dot'}${r[0] >= 0 && r[0] === ctx.state.site ? ' data-picked' : ''}` },
      svg('title', {}, `${found.names[r[4]]}: error ${error(r)}, tolerance ${number(r[3])}`));
      dot.addEventListener('click', () => pick(ctx, r));
      root.append(dot);
      if (first) {
        root.append(svg('line', { x1: x(i), x2: x(i), y1: top, y2: height - low, class: 'data-now' }),
          svg('text', { x: x(i) + (i > rows.length / 2 ? -8 : 8), y: top + 10, class: 'data-first',
            'text-anchor': i > rows.length / 2 ? 'end' : 'start' }, 'first'));
      }
    });
    root.append(svg('text', { x: (left + width) / 2, y: height - 6, 'text-anchor': 'middle', class: 'data-dim' },
      'in the order of execution →'));
    return el('div', { class: 'data-picture' }, root, el('p', { class: 'data-dim' },
      el('span', { class: 'data-swatch data-swatch-error', 'aria-hidden': 'true' }), 'error  ',
      el('span', { class: 'data-swatch data-swatch-above', 'aria-hidden': 'true' }), 'above its tolerance  ',
      el('span', { class: 'data-swatch data-swatch-line', 'aria-hidden': 'true' }), 'tolerance'));
  }

  /** Choose a row's site everywhere; of a parameter the output of the innermost module that has one. */
  function pick(ctx, row) {
    let site = row[0] >= 0 ? row[0] : undefined;
    const parts = ctx.page.divergence.names[row[4]].replace(/\.grad$/, '').split('.');
    while (site === undefined && parts.length > 1) {
      parts.pop();
      site = flexPage.site(`${parts.join('.')}:output`);
    }
    ctx.choose(site === undefined ? { iteration: row[1] } : { site, iteration: row[1] });
  }

  /** All rows as a list; the arrow keys go through it, Enter chooses. */
  function list(ctx, found, rows) {
    const box = el('div', { class: 'data-rows', role: 'listbox', 'aria-label': 'tensors in the order of execution' });
    const marked = rows.findIndex((r) => r.number === found.first_row);
    const chosen = rows.findIndex((r) => r[0] >= 0 && r[0] === ctx.state.site);
    const start = chosen >= 0 ? chosen : Math.max(0, marked);
    const from = Math.max(0, Math.min(start - 200, rows.length - 400)), some = rows.slice(from, from + 400);
    some.forEach((r, i) => {
      const first = r.number === found.first_row;
      const item = el('div', { role: 'option', tabindex: i + from === start ? '0' : '-1',
        'aria-selected': String(r[0] >= 0 && r[0] === ctx.state.site),
        class: `data-row${above(r) ? ' data-above' : ''}${first ? ' data-is-first' : ''}` },
      el('span', { class: 'data-row-name' }, found.names[r[4]], first ? el('strong', {}, ' first divergence') : ''),
      el('span', {}, error(r)), el('span', {}, number(r[3])));
      item.dataset.key = `row ${r.number}`;
      item.addEventListener('click', () => pick(ctx, r));
      item.addEventListener('keydown', (event) => {
        const to = { ArrowDown: item.nextElementSibling, ArrowUp: item.previousElementSibling }[event.key];
        if (to && to.getAttribute('role') === 'option') { item.tabIndex = -1; to.tabIndex = 0; to.focus(); } else if (event.key === 'Enter' || event.key === ' ') pick(ctx, r);
        else if (!['ArrowDown', 'ArrowUp'].includes(event.key)) return;
        event.preventDefault();
        event.stopPropagation();
      });
      box.append(item);
    });
    const out = el('div', {}, el('div', { class: 'data-row data-row-head', 'aria-hidden': 'true' },
      el('span', {}, 'tensor'), el('span', {}, 'error'), el('span', {}, 'tolerance')), box);
    if (some.length < rows.length) out.append(el('p', { class: 'data-dim' }, `${some.length} of ${rows.length} rows are listed, around the chosen or first one.`));
    requestAnimationFrame(() => {
      const now = box.children[start - from];
      if (now) box.scrollTop = now.offsetTop - box.offsetTop - box.clientHeight / 3;
    });
    return out;
  }

  function draw(root, ctx) {
    const found = ctx.page.divergence;
    for (const note of found.notes) root.append(el('p', { class: note.kind === 'damage' ? 'data-bad' : 'data-dim' }, note.text));
    root.append(el('p', { class: 'data-name' }, `A: ${found.a}`), el('p', { class: 'data-name' }, `B: ${found.b}`));
    if (!found.rows.length) { root.append(sentence('Nothing was compared: the two have no tensor in common.')); return; }
    found.rows.forEach((row, i) => { row.number = i; });
    const first = found.first_row === null ? null : found.rows[found.first_row];
    const sentences = {
      equal: 'Every entry of every tensor is the same.',
      'not distinguishable from round-off': 'They are not distinguishable from round-off: every tensor is within its bounds.',
      diverges: first ? `They diverge, first at ${found.names[first[4]]} in iteration ${first[1]}: error ${error(first)}, tolerance ${number(first[3])}.`
        : 'Replicas within one run are out of step; what was written is within its tolerances.',
      incomplete: 'The tensors that both have do not diverge, but only one of them has some hook points or iterations.',
      'cannot be compared': `They cannot be compared: ${found.incomparable}.`,
    };
    const verdict = sentences[found.verdict];
    const bad = first || found.incomparable;
    root.append(el('p', { class: bad ? 'data-verdict data-bad' : 'data-verdict', 'data-verdict': found.verdict }, verdict));
    for (const hint of found.hints) root.append(el('p', { class: 'data-hint' }, hint));
    const bar = el('div', { class: 'data-tools' });
    root.append(bar);
    if (first) {
      const go = el('button', { type: 'button', class: 'data-go' }, 'Go to the first divergence');
      go.dataset.key = 'first divergence';
      go.addEventListener('click', () => pick(ctx, first));
      bar.append(go);
    }
    const wanted = found.iterations.includes(ctx.state.iteration) ? ctx.state.iteration
      : first ? first[1] : found.iterations[0];
    if (found.iterations.length > 1) {
      bar.append(tools.menu('iteration', found.iterations.map((n) => ({ value: n, text: String(n) })), wanted,
        (n) => ctx.iterate(n), 'divergence iteration'));
    }
    const rows = found.rows.filter((r) => r[1] === wanted);
    root.append(head(`Iteration ${wanted}`), curve(ctx, found, rows), list(ctx, found, rows));
  }

  flexPage.dataViews = flexPage.dataViews || [];
  flexPage.dataViews.push({ id: 'divergence', title: 'Divergence', order: 5, draw,
    available: (page) => Boolean(page.divergence) });
})();
