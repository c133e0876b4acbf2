'use strict';
// Strips of layers: a cell for each, coloured by a number of what was recorded there, or by its stage.

const flexStrip = (() => {
  const { page, state, STATES, el, svg, matching, inLayer, layerOf } = flexPage;
  const { sites } = page;
  const tree = flexTree, { TALL } = tree;
  const BY = [['rms', 'RMS'], ['absmax', 'max |x|'], ['odd', 'NaN or infinite'], ['stage', 'stage']];
  const NONFINITE = 4 | 8; // the bits of a tensor's state
  const WIDE = 60; // ratio of greatest to least from which colours go by powers of ten

  /** What colours the cells: {root, update(), of(member)}; `redraw` is called when another number is wanted. */
  function scale(redraw) {
    const tools = flexPage.dataTools, { all, nearest } = flexSources;
    const root = el('div', { class: 'layer-scale' });
    let by = all.length ? 'rms' : 'stage', cells = new Map(), source = null, at = 0;
    const stacks = tree.blocks.filter((b) => b.stack);

    const valueOf = (site) => source.of(site).find((t) => source.kinds[t] === 0);
    const there = (site) => site !== undefined && valueOf(site) !== undefined && source.measure('rms', at, valueOf(site)) !== null;
    /** The site of which the number is shown: the chosen one, or what most layers have. */
    function family() {
      if (state.site !== null && layerOf(state.site) !== null && there(state.site)) return state.site;
      const found = new Map();
      stacks.flatMap((b) => b.members).forEach((member) => tree.inside(member).filter(there).forEach((site) => {
        const name = flexPage.family(sites.name[site]);
        found.set(name, [...(found.get(name) || []), site]);
      }));
      const best = [...found].sort((a, b) => b[1].length - a[1].length || a[0].length - b[0].length)[0];
      return best ? best[1][0] : null;
    }
    const odd = (member) => tree.inside(member).flatMap((s) => source.of(s)).filter((t) => source.state(at, t) & NONFINITE).length;

    function update() {
      cells = new Map();
      source = all[state.source] || all[0] || null;
      const key = [];
      if (!source || !source.iterations.length || !stacks.length) by = 'stage';
      else at = nearest(source, state.iteration);
      const measured = by === 'rms' || by === 'absmax';
      const site = measured ? family() : null;
      if (measured && site !== null) {
        const members = stacks.flatMap((b) => b.members);
        const values = members.map((m) => { const s = inLayer(site, m.label); return there(s) ? source.measure(by, at, valueOf(s)) : null; });
        const good = values.filter((v) => v !== null && v > 0), low = tools.least(good), high = tools.most(good);
        const log = high > WIDE * low, map = log ? Math.log : (v) => v, colours = tools.ramp('size');
        members.forEach((member, n) => {
          const value = values[n], bad = odd(member);
          const words = `${value === null ? 'not recorded' : `${label()} ${tools.number(value)}`}${bad ? `, NaN or infinite values in ${bad} tensors` : ''}`;
          const colour = value === null ? null : tools.css(colours[good.length && value > 0 ? tools.shade(map(value), map(low), map(high)) : 0]);
          cells.set(member, { colour, bad, words });
        });
        const name = sites.name[site].replace(/^.*?\.\d+[.:]/, '');
        if (good.length) key.push(el('span', { class: 'layer-words' }, `of ${name}, iteration ${source.iterations[at]}`), high > low ? tools.legend({ lo: low, hi: high, kind: 'size' }) : tools.number(low));
        else key.push(el('span', { class: 'layer-words' }, 'nothing was recorded in a layer'));
      } else if (by === 'odd') {
        const counts = stacks.flatMap((b) => b.members).map((member) => [member, odd(member)]);
        for (const [member, bad] of counts) cells.set(member, { colour: null, bad, words: bad ? `NaN or infinite values in ${bad} tensors` : 'all values are finite' });
        const bad = counts.filter(([, n]) => n).length;
        key.push(el('span', { class: 'layer-words' }, `in ${bad} of ${counts.length} layers, iteration ${source.iterations[at]}`));
      }
      if ([...cells.values()].some((c) => c.bad)) key.push(el('span', { class: 'layer-odd' }, svg('svg', { width: 12, height: 12, 'aria-hidden': 'true' }, svg('rect', { class: 'tick odd', width: 12, height: 12, rx: 2 })), 'NaN or infinite'));
      const had = root.contains(document.activeElement);
      const menu = tools.menu('layers by', BY.map(([value, text]) => ({ value, text })), by, (value) => { by = value; update(); redraw(); }, 'layers by');
      root.replaceChildren(menu, ...key);
      root.hidden = !source || !stacks.length;
      if (had) menu.querySelector('select').focus();
    }
    const label = () => BY.find(([value]) => value === by)[1];
    return { root, update, of: (member) => cells.get(member) };
  }

  /** A strip: of each member a cell; the one that is shown is marked. */
  function strip(members, at, x, y, wide, key, colours) {
    const per = tree.perRow(members.length, wide), each = tree.tick(members.length, wide), { wrong } = flexStrip;
    const list = svg('g', { class: 'strip', role: 'listbox', 'aria-label': key === null ? 'Layers' : 'Numbered modules', transform: `translate(${x} ${y})` });
    const { marks } = matching();
    members.forEach((member, n) => {
      const all = tree.inside(member), found = colours.of(member);
      const top = all.reduce((most, s) => (sites.state[s] <= 2 ? Math.max(most, sites.state[s]) : most), 0);
      const bad = all.some((s) => wrong.has(s)), stage = sites.stage[all[0]];
      const fits = all.some((s) => marks[s]);
      const words = `${member.label}, stage ${stage}${top ? `, ${STATES[top]}` : ''}${bad ? ', differs' : ''}${found ? `, ${found.words}` : ''}`;
      const tick = svg('rect', { class: `tick p${stage % 2}${found && found.bad ? ' odd' : ''}`, width: each - 2, height: TALL, rx: 2 });
      const cell = svg('g', {
        class: `cell${n === at ? ' here' : ''}${fits ? '' : ' dim'}`, role: 'option', tabindex: n === at ? '0' : '-1',
        'aria-selected': String(n === at), 'aria-label': words, [key === null ? 'data-layer' : 'data-member']: member.label,
        transform: `translate(${(n % per) * each} ${Math.floor(n / per) * (TALL + 4)})`,
      }, tick, svg('title', { text: words }));
      if (found && found.colour && !found.bad) tick.style.fill = found.colour;
      if (bad || (top && !found)) cell.append(svg('circle', { class: bad ? 'bad' : `s${top}`, cx: (each - 2) / 2, cy: TALL / 2, r: 2.6 }));
      cell.flexMember = { members, n, key, per };
      list.append(cell);
    });
    return list;
  }

  return { scale, strip, wrong: new Map() };
})();
