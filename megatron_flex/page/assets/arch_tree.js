'use strict';
// The model as blocks: modules by path, numbered ones that are alike folded into one, rows and dots with places.

const flexTree = (() => {
  const { page } = flexPage;
  const { sites } = page;
  const ROW = 20, INDENT = 13, LETTERS = 12.5, LETTER = 7.55, SMALL = 7.3, PAD = 14, HEAD = 30; // LETTERS: the font's size
  const LEAST = 310; // the inner width of a block
  const TICK = 13, TALL = 18; // of a layer in a strip
  const width = (text, each) => text.length * each;
  const dotted = (text) => width(text, SMALL) + 0.6 * SMALL * text.replace(/[^mw]/g, '').length; // m and w are broad

  // -- the tree ------------------------------------------------------------------------------------------

  function grown() {
    const root = { label: '', path: '', children: new Map(), sites: [], points: [] };
    for (let i = 0; i < sites.name.length; i += 1) {
      const [module, point = ''] = sites.name[i].split(/:(?=[^:]*$)/);
      let at = root;
      for (const step of module.split('.')) {
        if (!at.children.has(step)) {
          at.children.set(step, {
            label: step, path: at.path ? `${at.path}.${step}` : step, children: new Map(), sites: [], points: [],
          });
        }
        at = at.children.get(step);
      }
      at.sites.push(i);
      at.points.push(point);
    }
    return root;
  }

  const kinds = new Map();
  function kind(node) { // equal for modules that are alike: all but their number and what stands there
    if (node.kind === undefined) {
      const own = node.sites.map((s, n) => `${node.points[n]},${sites.layout[s]},${sites.shape[s]},${sites.reason[s]}`);
      const inner = [...node.children.values()].map((c) => `${c.label}=${kind(c)}`);
      const key = `${own.join(';')}|${inner.join(';')}`;
      if (!kinds.has(key)) kinds.set(key, kinds.size);
      node.kind = kinds.get(key);
    }
    return node.kind;
  }
  const numbered = (node) => /^\d+$/.test(node.label);

  function grouped(nodes) { // numbered ones that are alike together, where the first of them was
    const out = [], at = new Map();
    for (const node of nodes) {
      if (!numbered(node)) { out.push([node]); continue; }
      const key = kind(node);
      if (!at.has(key)) { at.set(key, []); out.push(at.get(key)); }
      at.get(key).push(node);
    }
    return out;
  }

  function series(members) { // `0–31`, `0,2–5`, `0–30:2`
    const left = members.map((m) => Number(m.label)).sort((a, b) => a - b), out = [];
    while (left.length) {
      const step = left.length > 1 ? left[1] - left[0] : 1;
      let run = 1;
      while (run < left.length && left[run] - left[run - 1] === step) run += 1;
      if (run < 3 && step !== 1) run = 1;
      const [first, last] = [left[0], left[run - 1]];
      out.push(run === 1 ? `${first}` : `${first}–${last}${step > 1 ? `:${step}` : ''}`);
      left.splice(0, run);
    }
    return out.join(',');
  }

  function every(node, out = []) { // all sites of a module and what is in it
    for (const s of node.sites) out.push(s);
    for (const child of node.children.values()) every(child, out);
    return out;
  }
  function inside(node) { node.all = node.all || every(node); return node.all; }

  // -- blocks --------------------------------------------------------------------------------------------

  function holds(node) { return [...node.children.values()].some((c) => numbered(c) || holds(c)); }

  function blocks(node, out = []) { // in model order: plain ones, and stacks of layers
    if (node.path && !holds(node)) { out.push({ title: node.path, members: [node], stack: false }); return out; }
    const inner = every({ sites: [], children: node.children })[0]; // sites are in the order of execution
    const own = (fits) => {
      const kept = node.sites.map((s, n) => n).filter((n) => fits(node.sites[n]));
      const some = (all) => kept.map((n) => all[n]);
      if (kept.length) out.push({ title: node.path, members: [{ ...node, kind: undefined, children: new Map(), sites: some(node.sites), points: some(node.points), all: some(node.sites) }], stack: false });
    };
    own((s) => s < inner);
    for (const group of grouped(node.children.values())) {
      if (numbered(group[0])) {
        out.push({ title: node.path, words: series(group), members: group, stack: true, at: 0, open: false });
      } else blocks(group[0], out);
    }
    own((s) => s >= inner);
    return out;
  }

  // Rows of a block: {label, x, y, dots: [{site, x, y, text}], strip: null | {key, members, at, wide}}; its size.
  // Dots that would be beyond `room` go on below.
  function rows(node, places, room) {
    const out = [];
    walk(node, 0, '', '');
    const named = Math.max(0, ...out.map((r) => (r.dots.length ? r.x + width(r.label, LETTER) : 0)));
    const from = named ? Math.max(56, named + 16) : 4;
    let wide = 170, y = 0;
    for (const row of out) {
      row.y = y;
      let x = from;
      for (const dot of row.dots) {
        if (x > from && x + 12 + dotted(dot.text) > room) { x = from; y += ROW; }
        dot.x = x;
        dot.y = y;
        x += 14 + dotted(dot.text) + 12;
        wide = Math.max(wide, x - 12);
      }
      wide = Math.max(wide, row.x + width(row.label, LETTER));
      y += ROW;
      if (row.strip) y += stripHeight(row.strip.members.length, row.strip.wide) + 6;
    }
    for (const row of out) if (row.strip) wide = Math.max(wide, row.x + row.strip.wide);
    return { rows: out, width: wide, height: y };

    function walk(at, depth, prefix, relative) {
      const dots = at.sites.map((site, n) => ({ site, text: at.points[n] || 'output', x: 0, y: 0 }));
      const groups = grouped(at.children.values());
      const label = depth ? prefix + at.label : '';
      const through = depth && !dots.length && groups.length === 1 && groups[0].length === 1;
      if (!through && (depth || dots.length)) out.push({ label, x: Math.max(0, depth - 1) * INDENT, y: 0, dots, strip: null });
      for (const group of groups) {
        const key = `${relative}.${group[0].label}`;
        const next = through ? `${label}.` : '';
        const deeper = through ? depth : depth + 1;
        if (group.length === 1) { walk(group[0], deeper, next, `${relative}.${group[0].label}`); continue; }
        const chosen = Math.min(places.get(key) || 0, group.length - 1);
        out.push({
          label: `${next}${series(group)} × ${group.length}`, x: Math.max(0, deeper - 1) * INDENT, y: 0, dots: [],
          strip: { key, members: group, at: chosen, wide: Math.min(250, room - Math.max(0, deeper - 1) * INDENT) },
        });
        walk(group[chosen], deeper + 1, '', key);
      }
    }
  }

  const tick = (count, wide) => Math.max(9, Math.min(TICK, Math.floor(wide / count))); // narrower where all fit into a row then
  const perRow = (count, wide) => Math.max(8, Math.floor(wide / tick(count, wide)));
  const stripHeight = (count, wide) => Math.ceil(count / perRow(count, wide)) * (TALL + 4);

  // Where blocks lie: boxes {block, number, node, x, y, w, h, rows, strip} of the whole scene.
  function scene(all, places, shape, wide) { // `wide`: the room for all of it
    const boxes = [], room = Math.max(230, wide - 2 * PAD), least = Math.min(LEAST, room);
    let y = 0, widest = 0;
    const made = all.map((block) => {
      const node = block.members[block.stack && !block.open ? block.at : 0];
      const one = rows(node, places, room);
      widest = Math.max(widest, one.width);
      return one;
    });
    all.forEach((block, n) => {
      const one = made[n];
      const inner = Math.max(widest, least);
      if (block.open) {
        const w = one.width + 2 * PAD, h = HEAD + one.height + PAD;
        const count = block.members.length;
        const columns = Math.max(1, Math.min(count, Math.round(Math.sqrt((count * h * shape) / w))));
        boxes.push({ block, node: null, x: 0, y, w: Math.max(inner + 2 * PAD, columns * (w + 12) - 12), h: HEAD + 4, rows: [], head: true });
        y += HEAD + 12;
        block.members.forEach((node, i) => {
          boxes.push({
            block, node, number: i, x: (i % columns) * (w + 12), y: y + Math.floor(i / columns) * (h + 12), w, h,
            get rows() { this.kept = this.kept || rows(node, places, room).rows; return this.kept; },
          });
        });
        y += Math.ceil(count / columns) * (h + 12) + 16;
        return;
      }
      const strip = block.stack && block.members.length > 1 ? stripHeight(block.members.length, inner) + 10 : 0;
      const h = HEAD + strip + one.height + (one.height ? PAD - 4 : 4);
      boxes.push({
        block, node: block.members[block.stack ? block.at : 0], number: block.stack ? block.at : null,
        x: 0, y, w: inner + 2 * PAD, h, rows: one.rows, strip,
      });
      y += h + 22;
    });
    const right = Math.max(1, ...boxes.map((b) => b.x + b.w));
    const ends = boxes.filter((b) => !b.block.open || b.head), middle = Math.min(...ends.map((b) => b.w)) / 2;
    const spine = ends.slice(1).map((b) => `M${middle} ${b.y - 21}v15m-3.5 -4.5l3.5 4.5l3.5 -4.5`).join('');
    return { boxes, spine, width: right, height: Math.max(1, y - 22), inner: Math.max(widest, least) };
  }

  // Which member of which nested fold a site is in: {key: place}, so that its dot is drawn.
  function way(node, site, relative = '', out = {}) {
    for (const group of grouped(node.children.values())) {
      const place = group.findIndex((member) => inside(member).includes(site));
      if (place < 0) continue;
      const key = `${relative}.${group[0].label}`;
      if (group.length > 1) out[key] = place;
      way(group[place], site, key, out);
    }
    return out;
  }

  return { blocks: blocks(grown()), scene, way, inside, tick, perRow, stripHeight, wide: dotted, ROW, PAD, HEAD, TICK, TALL, LETTERS };
})();
