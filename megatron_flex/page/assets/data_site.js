'use strict';
/* The chosen site's own pictures: what its tensors were over iterations, how they lie, what is in them. */
(() => {
  const { el, svg } = flexPage;
  const tools = flexPage.dataTools;
  const { number, sentence, span, head } = tools;
  const MEASURES = [['rms', 'rms'], ['absmax', 'max |x|'], ['mean', 'mean'], ['std', 'std'],
    ['zeros', 'exact zeros']];
  const KINDS = ['value', 'gradient', 'parameter', 'gradient of the parameter'];

  /** What is known of a tensor in an iteration, in one line of terms. */
  function facts(source, tensor, iteration) {
    const state = source.state(iteration, tensor), list = el('dl', { class: 'data-facts' });
    const add = (term, text) => list.append(el('div', {}, el('dt', {}, term), el('dd', {}, text)));
    if (state & 3) {
      add('iteration ' + source.iterations[iteration], (state & 3) === 2 ? 'damaged' : 'not there');
      return list;
    }
    for (const [name, words] of MEASURES) {
      const value = source.measure(name, iteration, tensor);
      if (value !== null) add(words, name === 'zeros' ? `${number(100 * value)} %` : number(value));
    }
    for (const [bit, words] of [[4, 'NaN'], [8, 'infinite']]) {
      if (state & bit) list.append(el('div', { class: 'data-bad' }, el('dt', {}, words), el('dd', {}, 'yes')));
    }
    return list;
  }

  /** A tensor's rms over iterations. */
  function overIterations(ctx, source, tensor) {
    const values = source.iterations.map((_, i) => source.measure('rms', i, tensor) ?? NaN);
    return tools.chart({ lines: [{ values, chosen: true, label: 'rms' }], at: source.at, height: 130,
      names: (i) => String(source.iterations[i]), across: 'iteration', label: 'rms over iterations',
      choose: (i) => ctx.iterate(source.iterations[i]) });
  }

  /** Histograms, the first iteration on top; heights are densities, relative to the greatest of each. */
  function ridges(ctx, source, packed) {
    const { edges, linear } = packed, lowest = edges[0], highest = edges[edges.length - 1];
    const several = packed.counts.length, width = tools.room(), left = 64, right = 14, low = 26;
    const step = several > 8 ? 15 : 26, tall = several > 1 ? step * 2.2 : 90, height = tall + step * (several - 1) + low + 4;
    const symlog = (value) => (Math.abs(value) <= linear ? value / linear : Math.sign(value) * (1 + Math.log2(Math.abs(value) / linear)));
    const at = (value) => left + ((width - left - right) * (symlog(value) - symlog(lowest))) / (symlog(highest) - symlog(lowest));
    const root = svg('svg', { width, height, class: 'data-chart', role: 'img',
      'aria-label': `Histograms of ${several} iterations, from ${number(lowest)} to ${number(highest)}` });
    packed.counts.forEach((counts, row) => {
      const densities = counts.map((n, bin) => n / (symlog(edges[bin + 1]) - symlog(edges[bin])));
      const base = tall + step * row, top = tools.most(densities) || 1;
      const i = packed.at[row], on = i === source.at;
      let path = `M${at(lowest)} ${base}`;
      densities.forEach((n, bin) => {
        const y = (base - (tall - 6) * (n / top)).toFixed(1);
        path += `L${at(edges[bin]).toFixed(1)} ${y}L${at(edges[bin + 1]).toFixed(1)} ${y}`;
      });
      const ridge = svg('path', { d: `${path}L${at(highest)} ${base}Z`, class: on ? 'data-ridge data-on' : 'data-ridge' },
        svg('title', {}, `iteration ${source.iterations[i]}: ${number(tools.sum(counts) + packed.zeros[row])} values`));
      ridge.addEventListener('click', () => ctx.iterate(source.iterations[i]));
      root.append(ridge, svg('text', { x: left - 6, y: base, 'text-anchor': 'end',
        class: on ? 'data-on' : '' }, String(source.iterations[i])));
    });
    const ticks = []; // the most telling first, as many as there is room for
    for (const value of [lowest, highest, 0, -linear, linear, -linear / 2, linear / 2, ...edges]) {
      const x = at(value);
      if (value >= lowest && value <= highest && !ticks.some((t) => Math.abs(t - x) < 68)) {
        ticks.push(x);
        root.append(svg('text', { x, y: height - 8, 'text-anchor': value === lowest ? 'start' : value === highest ? 'end' : 'middle' }, number(value)));
      }
    }
    return el('div', { class: 'data-picture' }, root, el('p', { class: 'data-dim' },
      `Densities, on an axis that is linear to ±${number(linear)} and logarithmic beyond.${tools.sum(packed.zeros) ? ' Exact zeros are not drawn.' : ''}`));
  }

  /** The heat map of tokens x features; `scale` so that two can be compared. */
  function tokens(source, packed, name, scale) {
    const [rows, columns] = packed.shape, [tall, wide] = packed.of;
    const values = tools.unpack(packed), mean = packed.mean ? 'mean magnitude ' : '';
    return tools.heat({ values, rows, columns, scale, key: `heat ${name}`, axes: ['token', 'feature'],
      label: `${name}: token x feature`, height: Math.max(120, Math.min(320, rows * 5)),
      tell: (r, c) => `token ${span(packed.rows, r, tall)}, feature ${span(packed.columns, c, wide)}: ${mean}` +
        number(values[r * columns + c]) });
  }

  /** Why there is no heat map here, and where there is one. */
  function instead(ctx, source, tensor) {
    if (source.kind === 'statistics') {
      return sentence('Statistics keep no entries: dump this site (mf.Dump) to see its tokens and features.');
    }
    const others = source.heatIterations(tensor), now = source.iterations[source.at];
    if (!others.length) return sentence(`This page has no heat map of ${source.names[tensor]}.`);
    const out = sentence(`There is no heat map of iteration ${now} on this page; there is of `);
    for (const i of others) {
      const go = el('button', { type: 'button', class: 'data-go' }, String(source.iterations[i]));
      go.addEventListener('click', () => ctx.iterate(source.iterations[i]));
      out.append(go, ' ');
    }
    return out;
  }

  /** All pictures of one source's tensor. */
  function pictures(ctx, source, tensor, scale) {
    const out = el('div', { class: 'data-column' }), name = source.names[tensor];
    if (ctx.both) out.append(head(`${source.label}: ${source.words}`));
    out.append(facts(source, tensor, source.at));
    const trouble = source.trouble(source.at, tensor) || source.lacks[name];
    if (trouble) out.append(sentence(trouble));
    const packed = source.heat(tensor);
    if (packed) {
      out.append(head('tokens x features', el('span', { class: 'data-dim' }, ` ${packed.caption}`)),
        tokens(source, packed, `${source.label} ${name}`, scale));
    } else if (!trouble) out.append(instead(ctx, source, tensor));
    const counts = source.histograms[tensor];
    if (counts) out.append(head('Histogram by iteration'), ridges(ctx, source, counts));
    if (source.iterations.length > 1) out.append(head('rms by iteration'), overIterations(ctx, source, tensor));
    return out;
  }

  /** The same scale for both sources, so that colours can be compared. */
  function together(sources, found) {
    const packed = sources.map((s, i) => (found[i] < 0 ? null : s.heat(found[i]))).filter(Boolean);
    if (packed.length < 2) return undefined;
    const values = packed.flatMap((p) => { const e = tools.ends(tools.unpack(p)); return [e.lo, e.hi]; });
    return tools.ends(values);
  }

  function draw(root, ctx) {
    const { state, page } = ctx;
    if (state.site === null || state.site === undefined) {
      root.append(sentence('Choose a site, in the architecture or below: its own pictures are drawn here.'));
      const list = el('div', { class: 'data-list' });
      ctx.source.sites.forEach((site, t) => {
        if (site < 0 || list.children.length >= 60 || ctx.source.kinds[t] !== 0) return;
        const button = el('button', { type: 'button' }, ctx.source.names[t]);
        button.addEventListener('click', () => ctx.choose({ site }));
        list.append(button);
      });
      root.append(list);
      return;
    }
    const site = page.sites.name[state.site];
    const shown = ctx.both ? ctx.sources : [ctx.source];
    const there = [...new Set(shown.flatMap((s) => s.of(state.site).map((t) => s.kinds[t])))].sort();
    const kind = there.includes(ctx.local.kind) ? ctx.local.kind : there[0];
    root.append(el('p', { class: 'data-name' }, site));
    if (there.length > 1) {
      root.append(tools.choice('which tensor of the site', there.map((k) => ({ value: k, text: KINDS[k] })), kind,
        (k) => { ctx.local.kind = k; ctx.redraw(); }, 'kind'));
    }
    const found = shown.map((s) => s.of(state.site).find((t) => s.kinds[t] === kind) ?? -1);
    const scale = ctx.both ? together(shown, found) : undefined;
    const several = found.filter((t) => t >= 0).length > 1; // one alone has the full width
    tools.measure(root.clientWidth, several);
    const columns = el('div', { class: several ? 'data-columns' : '' });
    shown.forEach((source, i) => {
      if (found[i] >= 0) columns.append(pictures(ctx, source, found[i], scale));
      else {
        const column = el('div', { class: 'data-column' });
        if (ctx.both) column.append(head(`${source.label}: ${source.words}`));
        column.append(sentence(source.kind === 'statistics'
          ? `These statistics have nothing of ${site}: measure it with mf.Statistics(…, sites=[${quoted(site)}]).`
          : `This dump has nothing of ${site}: dump it with mf.Dump(…, sites=[${quoted(site)}]).`));
        columns.append(column);
      }
    });
    root.append(columns);
    if (site.endsWith(':probs') && flexPage.dataHeads) flexPage.dataHeads(root, ctx);
  }

  const quoted = (name) => JSON.stringify(name);

  flexPage.dataViews = flexPage.dataViews || [];
  flexPage.dataViews.push({ id: 'site', title: 'Site', order: 0, draw });
})();
