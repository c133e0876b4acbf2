'use strict';
/* Attention patterns of each head, one enlarged; and the logit lens, layer by layer. */
(() => {
  const { el } = flexPage;
  const tools = flexPage.dataTools;
  const { number, sentence, span, head } = tools;

  /** The values of one head. */
  function values(packed, which) {
    const size = packed.shape[1] * packed.shape[2];
    return tools.unpack(packed).subarray(which * size, (which + 1) * size);
  }

  /** What all but 3 of 100 patterns' entries stay below: the first tokens would leave all others dark. */
  function loud(packed) {
    const there = Array.from(tools.unpack(packed)).filter((v) => v > 0).sort((a, b) => a - b);
    return there.length ? there[Math.min(there.length - 1, Math.floor(0.97 * there.length))] : 1;
  }

  function small(ctx, packed, which, chosen, scale) {
    const canvas = el('canvas', { class: 'data-canvas', 'aria-hidden': 'true' });
    tools.paint(canvas, values(packed, which), packed.shape[1], packed.shape[2], scale);
    const button = el('button', { type: 'button', class: 'data-head-map', role: 'radio', 'aria-checked': String(chosen),
      'aria-label': `head ${which}`, tabindex: chosen ? '0' : '-1' }, canvas, el('span', {}, `head ${which}`));
    button.dataset.key = `head ${which}`;
    button.dataset.head = which;
    button.addEventListener('click', () => { ctx.local.head = which; ctx.redraw(); });
    return button;
  }

  function heads(root, ctx) {
    const { source, state } = ctx;
    if (!source.attention.length) {
      root.append(sentence(source.lacks.attention || 'There are no attention patterns here.'));
      return;
    }
    const layers = source.attention.map((one) => one.layer);
    const wanted = state.layer !== null && layers.includes(state.layer) ? state.layer : null;
    const layer = wanted ?? (layers.includes(ctx.local.layer) ? ctx.local.layer : layers[0]);
    const packed = source.attention.find((one) => one.layer === layer);
    const [count, rows, columns] = packed.shape;
    const chosen = Math.min(ctx.local.head || 0, count - 1);
    root.append(el('div', { class: 'data-tools' }, tools.menu('layer', layers.map((l) => ({ value: l, text: String(l) })),
      layer, (l) => { ctx.local.layer = l; ctx.choose({ layer: l }); ctx.redraw(); }, 'attention layer')));
    if (state.layer !== null && wanted === null) {
      root.append(sentence(source.lacks[`attention ${state.layer}`]
        || `Layer ${state.layer} has no attention pattern on this page; layer ${layer} is shown.`));
    }
    const scale = { lo: 0, hi: loud(packed), kind: 'share', open: true };
    const group = el('div', { class: 'data-heads', role: 'radiogroup', 'aria-label': `attention heads of layer ${layer}` });
    for (let which = 0; which < count; which += 1) group.append(small(ctx, packed, which, which === chosen, scale));
    tools.arrows(group, (step) => {
      ctx.local.head = (chosen + step + count) % count;
      ctx.redraw(`head ${ctx.local.head}`);
    });
    const large = values(packed, chosen);
    root.append(head(`Attention of layer ${layer}`, el('span', { class: 'data-dim' }, ` ${packed.caption}`)), group,
      head(`Head ${chosen}`), tools.heat({ values: large, rows, columns, scale, key: 'large head', height: 320, width: 320,
        axes: ['query', 'key'], label: `attention of layer ${layer}, head ${chosen}: query x key`,
        tell: (r, c) => `token ${span(packed.queries, r, packed.of[0])} looks at ${span(packed.keys, c, packed.of[1])}: ` +
          number(large[r * columns + c]) }));
  }

  function lens(root, ctx) {
    const { source, state } = ctx, found = source.lens;
    if (!found) {
      root.append(sentence(source.lacks.lens || 'There is no logit lens here.'));
      return;
    }
    root.append(head('Logit lens', el('span', { class: 'data-dim' }, ` ${found.caption}`)), el('p', { class: 'data-dim' },
      'The likeliest next token, by its number in the vocabulary, if the model ended after each layer; the shade is its probability. Move with the arrow keys; hover over a cell for its details.'));
    const top = tools.most(found.shares.flat(1).map((k) => k[0] ?? 0)) || 1;
    const colours = tools.ramp('share'), said = el('output', { class: 'data-said', 'aria-live': 'polite' });
    const table = el('table', { class: 'data-lens', 'aria-label': 'logit lens: likeliest token by layer and position' });
    table.append(el('thead', {}, el('tr', {}, el('th', { scope: 'col' }, 'after layer'),
      ...found.tokens.map((t) => el('th', { scope: 'col' }, String(t))))));
    const body = el('tbody', {});
    for (let l = 0; l < found.layers.length; l += 1) { // downwards, as the model runs
      const behind = found.layers[l] - 1, name = behind < 0 ? 'embedding' : String(behind);
      const row = el('tr', { class: state.layer !== null && behind === state.layer ? 'data-on' : '' },
        el('th', { scope: 'row' }, name));
      found.ids[l].forEach((ids, t) => {
        const share = found.shares[l][t][0], where = tools.shade(share ?? 0, 0, top);
        const cell = el('td', { tabindex: l === 0 && t === 0 ? '0' : '-1' }, String(ids[0]));
        const [r, g, b] = colours[where];
        cell.style.background = tools.css(colours[where]);
        cell.style.color = 0.3 * r + 0.59 * g + 0.11 * b > 140 ? '#111' : '#fff';
        const words = `position ${found.tokens[t]}, after ${behind < 0 ? 'the embedding' : `layer ${behind}`}: ` +
          ids.map((id, k) => `${id} (${number(found.shares[l][t][k])})`).join(', ');
        cell.setAttribute('aria-label', words);
        cell.addEventListener('pointerenter', () => { said.textContent = words; });
        cell.addEventListener('focus', () => { said.textContent = words; });
        cell.addEventListener('click', () => { if (behind >= 0) ctx.choose({ layer: behind }); });
        row.append(cell);
      });
      body.append(row);
    }
    table.append(body);
    table.addEventListener('keydown', (event) => {
      const cell = document.activeElement, row = cell.parentElement;
      const next = { ArrowRight: () => cell.nextElementSibling, ArrowLeft: () => cell.previousElementSibling,
        ArrowDown: () => row.nextElementSibling && row.nextElementSibling.children[cell.cellIndex],
        ArrowUp: () => row.previousElementSibling && row.previousElementSibling.children[cell.cellIndex],
        Enter: () => { cell.click(); return null; } }[event.key];
      if (!next || cell.tagName !== 'TD') return;
      event.preventDefault();
      event.stopPropagation();
      const to = next();
      if (to && to.tagName === 'TD') { cell.tabIndex = -1; to.tabIndex = 0; to.focus(); }
    });
    root.append(el('div', { class: 'data-scroll' }, table), said, tools.legend({ lo: 0, hi: top, kind: 'share' }));
  }

  flexPage.dataHeads = heads;
  flexPage.dataViews = flexPage.dataViews || [];
  flexPage.dataViews.push({ id: 'attention', title: 'Attention', order: 2, draw: heads },
    { id: 'lens', title: 'Logit lens', order: 3, draw: lens });
})();
