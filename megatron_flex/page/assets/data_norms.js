'use strict';
/* Numbers over layers and iterations: of all tensors of one name, and of parameters and their gradients. */
(() => {
  const { el, family, layerIn } = flexPage;
  const tools = flexPage.dataTools;
  const { number, sentence, head } = tools;
  const MEASURES = [['rms', 'rms'], ['absmax', 'max |x|'], ['mean', 'mean'], ['std', 'std'],
    ['zeros', 'part of exact zeros']];

  /** Names with the layer left out, each with its tensors; those of several layers first. */
  function families(source, kinds) {
    const found = new Map();
    source.names.forEach((name, tensor) => {
      if (!kinds.includes(source.kinds[tensor])) return;
      const key = family(name);
      if (!found.has(key)) found.set(key, []);
      found.get(key).push(tensor);
    });
    for (const several of found.values()) several.sort((a, b) => layerIn(source.names[a]) - layerIn(source.names[b]));
    return found;
  }

  /** Of all layers' outputs, or whatever has most layers. */
  function preferred(found) {
    if (found.has('decoder.layers.*:output')) return 'decoder.layers.*:output';
    return [...found.keys()].reduce((a, b) => (found.get(b).length > found.get(a).length ? b : a));
  }

  const label = (source, tensor) => {
    const at = layerIn(source.names[tensor]);
    return at === null ? source.names[tensor] : String(at);
  };

  function lines(ctx, source, several, measure, log) {
    const many = source.iterations.length;
    const shown = many > 12 ? [...new Set([...Array(12).keys()].map((k) => Math.round((k * (many - 1)) / 11)).concat(source.at))]
      : [...Array(many).keys()];
    const colours = tools.ramp('share');
    const all = shown.sort((a, b) => (a === source.at) - (b === source.at)).map((i) => ({
      values: several.map((t) => source.measure(measure, i, t) ?? NaN), chosen: i === source.at,
      label: `iteration ${source.iterations[i]}`,
      colour: i === source.at ? null : tools.css(colours[many > 1 ? 90 + Math.round((120 * i) / (many - 1)) : 150]),
    }));
    const chosen = several.findIndex((t) => source.sites[t] >= 0 && source.sites[t] === ctx.state.site);
    return tools.chart({ lines: all, names: (k) => label(source, several[k]), at: chosen, log,
      across: several.length > 1 ? 'layer' : '', label: `${measure} by layer, a line for each iteration`,
      choose: (k) => ctx.choose(source.sites[several[k]] >= 0 ? { site: source.sites[several[k]] } : {}) });
  }

  function table(ctx, source, several, measure, log) {
    const rows = several.length, columns = source.iterations.length;
    const raw = (k) => source.measure(measure, k % columns, several[Math.floor(k / columns)]);
    const odd = (k) => source.state(k % columns, several[Math.floor(k / columns)]);
    const map = (v) => (v === null ? NaN : log ? (v > 0 ? Math.log10(v) : NaN) : v);
    const values = Float32Array.from({ length: rows * columns }, (_, k) => map(raw(k)));
    const found = tools.ends(values, log ? 'size' : undefined);
    const good = Array.from(values).filter(Number.isFinite); // of magnitudes all colours, not from zero on
    const scale = found.kind === 'size' && good.length ? { ...found, lo: tools.least(good) } : found;
    const chosen = several.findIndex((t) => source.sites[t] >= 0 && source.sites[t] === ctx.state.site);
    return tools.heat({ values, rows, columns, scale, key: 'norms', axes: [rows > 1 ? 'layer' : '', log ? 'iteration, log10 of values' : 'iteration'],
      label: `${measure} by layer and iteration`, height: Math.max(60, Math.min(260, rows * 12)),
      at: chosen >= 0 ? [chosen, source.at] : undefined, missing: (k) => raw(k) === null,
      tell: (r, c) => {
        const k = r * columns + c, state = odd(k), value = raw(k);
        const words = value === null ? ((state & 3) === 2 ? 'damaged' : 'not there') : `${measure} ${number(value)}`;
        return `${source.names[several[r]]}, iteration ${source.iterations[c]}: ${words}` +
          `${state & 4 ? ', has NaN' : ''}${state & 8 ? ', has infinite values' : ''}${state & 16 ? ', of some samples' : ''}`;
      },
      choose: (r, c) => {
        const site = source.sites[several[r]];
        ctx.choose({ iteration: source.iterations[c], ...(site >= 0 ? { site } : {}) });
      } });
  }

  /** Which of the layers have NaNs, infinities or damage, in words. */
  function wrong(source, several) {
    const found = [];
    for (const [bit, words] of [[4, 'NaN'], [8, 'infinite values']]) {
      const bad = several.filter((t) => source.iterations.some((_, i) => source.state(i, t) & bit));
      if (bad.length) found.push(`${words} in ${bad.slice(0, 3).map((t) => source.names[t]).join(', ')}${bad.length > 3 ? ` and ${bad.length - 3} more` : ''}`);
    }
    const lost = several.filter((t) => source.iterations.some((_, i) => (source.state(i, t) & 3) === 2));
    if (lost.length) found.push(`damaged: ${lost.slice(0, 3).map((t) => source.names[t]).join(', ')}${lost.length > 3 ? ` and ${lost.length - 3} more` : ''}`);
    return found;
  }

  function draw(root, ctx, kinds, id, nothing) {
    const { source, local } = ctx, found = families(source, kinds);
    if (!found.size || !source.iterations.length) { root.append(sentence(nothing)); return; }
    const key = found.has(local[id]) ? local[id] : preferred(found);
    const several = found.get(key), measure = local.measure || 'rms';
    root.append(el('div', { class: 'data-tools' },
      tools.menu('tensors', [...found.keys()].map((k) => ({ value: k,
        text: found.get(k).length > 1 ? `${k}  (${found.get(k).length})` : k })), key, (k) => { local[id] = k; ctx.redraw(); }, `${id} family`),
      tools.menu('number', MEASURES.map(([value, text]) => ({ value, text })), measure,
        (m) => { local.measure = m; ctx.redraw(); }, `${id} measure`)));
    const good = several.flatMap((t) => source.iterations.map((_, i) => source.measure(measure, i, t)))
      .filter((v) => v !== null);
    for (const text of wrong(source, several)) root.append(el('p', { class: 'data-bad' }, text));
    if (!good.length) { root.append(sentence('None of these can be read in any iteration that is shown.')); return; }
    const positive = good.filter((v) => v > 0);
    const log = measure !== 'zeros' && positive.length === good.length && tools.most(good) > 60 * tools.least(good);
    if (several.length > 1) {
      root.append(head(`${MEASURES.find(([m]) => m === measure)[1]} by layer`, el('span', { class: 'data-dim' },
        source.iterations.length > 1 ? ` strong line: iteration ${source.iterations[source.at]}; thin lines: the other iterations of the dump` : '')),
      lines(ctx, source, several, measure, log));
    } else {
      root.append(head(`${key}: ${MEASURES.find(([m]) => m === measure)[1]} by iteration`), tools.chart({
        lines: [{ values: source.iterations.map((_, i) => source.measure(measure, i, several[0]) ?? NaN), chosen: true }],
        names: (i) => String(source.iterations[i]), at: source.at, log, across: 'iteration',
        label: `${measure} by iteration`, choose: (i) => ctx.iterate(source.iterations[i]) }));
    }
    if (source.iterations.length > 1) root.append(head('over layers and iterations'), table(ctx, source, several, measure, log));
  }

  flexPage.dataViews = flexPage.dataViews || [];
  flexPage.dataViews.push(
    { id: 'norms', title: 'Norms', order: 1, draw: (root, ctx) => draw(root, ctx, [0, 1], 'norms',
      'There are no tensors of sites here: dump some, for example mf.Dump(folder, ["decoder.layers.*"]).') },
    { id: 'parameters', title: 'Parameters', order: 4, draw: (root, ctx) => draw(root, ctx, [2, 3], 'parameters',
      'There are no parameters or their gradients here: dump them with mf.Dump(…, parameters=["**"]), their gradients with gradients=True.') },
  );
})();
