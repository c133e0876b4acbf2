'use strict';
// Which part of a site's tensor which rank holds, out of the layout's picture; where ranks stand on the page.

const flexParts = (() => {
  const { page, mesh, svg } = flexPage;
  const { sites } = page;
  const stageAxis = page.mesh.axes.find((a) => a.name === 'pp');
  const count = page.mesh.ranks;
  const BETWEEN = 0.6; // stages, in cells

  function colour(n, of, dark) { // neighbours differ in hue, and in lightness where there are many
    if (of <= 1) return dark ? 'oklch(0.72 0.09 235)' : 'oklch(0.66 0.1 235)';
    const hue = (255 + (300 * n) / of) % 360, lift = of > 8 ? (n % 2 ? 0.05 : -0.04) : 0;
    return dark ? `oklch(${0.72 + lift} 0.1 ${hue.toFixed(0)})` : `oklch(${0.7 + lift} 0.115 ${hue.toFixed(0)})`;
  }

  const made = new Map();
  function parts(site) { // {picture, keys: [ranks in words], of: Int32Array by rank (-1: none), blocks: [part]}
    const stage = sites.stage[site], number = sites.layout[site];
    const name = `${number}/${stage}`;
    if (made.has(name)) return made.get(name);
    const { picture } = page.layouts[number];
    const of = new Int32Array(count).fill(-1);
    const words = [], blocks = [], at = new Map(), keys = new Map();
    let axes = [];
    if (picture) {
      const named = picture.blocks.flatMap((b) => b.ranks.flatMap((r) => Object.keys(r)));
      axes = mesh.axes.filter((a) => named.includes(a.name));
      for (const block of picture.blocks) {
        const places = block.ranks.map((r) => axes.map((a) => r[a.name] ?? 0).join());
        const key = places.join(';');
        if (!keys.has(key)) { keys.set(key, keys.size); words.push(holders(block.ranks)); }
        blocks.push(keys.get(key));
        for (const place of places) if (!at.has(place)) at.set(place, keys.get(key));
      }
    } else { words.push('every rank'); at.set('', 0); }
    for (let i = 0; i < count; i += 1) {
      const rank = mesh.first + i;
      if (stageAxis && mesh.coord(rank, stageAxis) !== stage) continue;
      of[i] = at.get(axes.map((a) => mesh.coord(rank, a)).join()) ?? -1;
    }
    const out = { picture, words, of, blocks, known: picture !== null };
    made.set(name, out);
    return out;
  }

  function holders(ranks) { // `tp 0`, `tp 0,1`, `cp 0 tp 1`, `every rank`
    const by = new Map();
    for (const rank of ranks) for (const [a, c] of Object.entries(rank)) by.set(a, (by.get(a) || new Set()).add(c));
    if (!by.size) return 'every rank of the stage';
    const all = [...by.values()].reduce((n, set) => n * set.size, 1);
    if (all === ranks.length) return [...by].map(([a, set]) => `${a} ${[...set].sort((x, y) => x - y).join(',')}`).join(' ');
    return ranks.map((r) => Object.entries(r).map(([a, c]) => `${a} ${c}`).join(' ')).join('; ');
  }

  // -- the grid ------------------------------------------------------------------------------------------

  const LEAST = 4; // pixels of a rank; what is larger than the pane then is scrolled
  // Places of all ranks: stages below each other, in columns where that is too high; in each stage blocks of two inner
  // axes, side by side.
  function grid(width, height) {
    const live = page.mesh.axes.filter((a) => a.size > 1 && a !== stageAxis);
    const [across, ...others] = [...live].reverse();
    const stages = stageAxis ? stageAxis.size : 1;
    const labels = stages > 1 ? 60 : 4, apart = 18; // of stages; between columns of them
    const w = across ? across.size : 1;
    let best = null;
    // The second axis goes down, or, where that would be one long column, is wrapped like those outside it.
    for (const [down, outer] of others.length ? [[others[0], others.slice(1)], [null, others]] : [[null, []]]) {
      const h = down ? down.size : 1, blocks = outer.reduce((n, a) => n * a.size, 1);
      const alone = h === 1 && blocks === 1;
      for (let folds = 1; folds <= stages; folds += 1) { // columns of stages
        const rows_ = Math.ceil(stages / folds);
        if (Math.ceil(stages / rows_) !== folds) continue;
        for (const wrap of wrapsOf(blocks)) {
          for (const line of alone ? wrapsOf(w) : [w]) { // a single long axis is wrapped, too
            const tall = alone ? Math.ceil(w / line) : h, rows = Math.ceil(blocks / wrap);
            const columns = wrap * line + (wrap - 1) * 0.6, gaps = h === 1 ? 0.25 : 0.6;
            const lines = rows_ * (rows * tall + (rows - 1) * gaps) + (rows_ - 1) * BETWEEN;
            const cell = Math.min(44, ((width - apart * (folds - 1)) / folds - labels) / columns, (height - 4) / lines);
            const text = stages > 1 && (rows * tall + BETWEEN) * Math.max(LEAST, cell) < 15; // labels of stages would overlap
            if (!best || (best.text && !text) || (best.text === text && cell > best.cell + 0.01)) best = { cell, text, wrap, line, tall, rows, gaps, down, outer, folds, rows_ };
          }
        }
      }
    }
    const { down, outer, folds, rows_ } = best;
    const cell = Math.max(LEAST, best.cell), gap = 0.6 * cell, under = best.gaps * cell, between = BETWEEN * cell;
    const stageHeight = cell * (best.rows * best.tall) + under * (best.rows - 1);
    const stageWidth = labels + best.wrap * best.line * cell + (best.wrap - 1) * gap + apart;
    const x = new Float32Array(count), y = new Float32Array(count);
    for (let i = 0; i < count; i += 1) {
      const rank = mesh.first + i;
      let block = 0;
      for (const a of [...outer].reverse()) block = block * a.size + mesh.coord(rank, a);
      const [a, d] = [across ? mesh.coord(rank, across) : 0, down ? mesh.coord(rank, down) : 0];
      const stage = stageAxis ? mesh.coord(rank, stageAxis) : 0;
      const [bx, by] = [block % best.wrap, Math.floor(block / best.wrap)];
      x[i] = Math.floor(stage / rows_) * stageWidth + labels + bx * (best.line * cell + gap) + (a % best.line) * cell;
      y[i] = (stage % rows_) * (stageHeight + between) + by * (best.tall * cell + under) + (d + Math.floor(a / best.line)) * cell;
    }
    const tags = [], step = stageHeight + between;
    for (let s = 0; stages > 1 && s < stages; s += 1) {
      const row = s % rows_;
      if (step >= 13 || row % Math.ceil(13 / step) === 0) {
        tags.push({ x: Math.floor(s / rows_) * stageWidth, y: row * step + Math.max(11, Math.min(stageHeight / 2, 14) + 4), text: `stage ${s}` });
      }
    }
    return {
      x, y, cell, tags,
      width: folds * stageWidth - apart + 2,
      height: Math.max(rows_ * stageHeight + (rows_ - 1) * between, stages > 1 ? 16 : 0) + 2,
      words: [across && `${across.name} →`, down && `${down.name} ↓`, outer.length > 0 && `blocks: ${outer.map((a) => a.name).join(', ')}`, stages > 1 && (folds > 1 ? 'rows and columns: pp' : 'rows: pp')].filter(Boolean).join('   '),
    };
  }
  function wrapsOf(n) { // how many may be beside each other, most first: an axis is drawn along its arrow where it can be
    const out = [];
    for (let i = n; i >= 1; i -= 1) if (n % i === 0) out.push(i);
    return out;
  }

  // -- the tensor ----------------------------------------------------------------------------------------

  const WIDEST = 250, H = 104, TOP = 24;
  function tensor(found, dark, room) { // an SVG of the tensor cut into blocks, each with data-part
    const { picture, blocks, words } = found;
    const LEFT = picture.names[0] ? 30 + 7 * picture.names[0].length : 6, W = Math.max(120, Math.min(WIDEST, room - LEFT - 10));
    const [sx, sy] = [W / picture.lengths[1], H / picture.lengths[0]];
    const rects = picture.blocks.map((block, n) => {
      const [x, y] = [LEFT + block.columns[0] * sx, TOP + block.rows[0] * sy];
      const [w, h] = [(block.columns[1] - block.columns[0]) * sx, (block.rows[1] - block.rows[0]) * sy];
      const text = words[blocks[n]];
      const label = text.length * 7 + 6 < w && h > 14 ? svg('text', { x: x + w / 2, y: y + h / 2 + 4, 'text-anchor': 'middle', text }) : null;
      return svg('g', { class: 'piece', 'data-part': blocks[n], role: 'option', tabindex: n ? '-1' : '0', 'aria-label': `part of ${text}`, 'aria-selected': 'false' },
        svg('rect', { x: x + 0.5, y: y + 0.5, width: Math.max(0.6, w - 1), height: Math.max(0.6, h - 1), rx: Math.min(3, w / 4, h / 4), fill: colour(blocks[n], words.length, dark) }),
        label, svg('title', { text }));
    });
    return svg('svg', { class: 'tensor', width: LEFT + W + 4, height: TOP + H + 6, viewBox: `0 0 ${LEFT + W + 4} ${TOP + H + 6}`, role: 'listbox', 'aria-label': 'The tensor, cut into the parts that ranks hold' },
      svg('text', { x: LEFT + W / 2, y: 14, 'text-anchor': 'middle', text: `${picture.names[1] || 'one'} →` }),
      svg('text', { x: LEFT - 9, y: TOP + H / 2 + 4, 'text-anchor': 'end', text: picture.names[0] ? `${picture.names[0]} ↓` : '' }),
      rects);
  }

  return { parts, grid, tensor, colour, stageAxis, count };
})();
