'use strict';
// What the panes share: the page's values, what is chosen, elements, numbers in words.
// A pane says flexPage.pane(id, {title, make}); make(root) draws once and returns {update(state, changed)},
// which is called with the names of what changed whenever something is chosen anywhere.

const flexPage = (() => {
  const page = JSON.parse(document.getElementById('page').textContent);
  const names = page.sites.name;
  const STATES = ['available', 'hooked', 'recorded', 'hidden', 'read only'];
  const state = {
    site: null, rank: null, layer: null, part: null, source: 0, iteration: null,
    filter: '', group: '', stage: null, kind: null,
  };
  const numbers = new Map(names.map((name, i) => [name, i]));
  const panes = [];
  const listeners = [];

  // -- elements ------------------------------------------------------------------------------------------

  function dress(node, attrs, children) {
    for (const [name, value] of Object.entries(attrs || {})) {
      if (value === null || value === undefined || value === false) continue;
      if (typeof value === 'function') node.addEventListener(name.replace(/^on/, ''), value);
      else if (name === 'text') node.textContent = value;
      else node.setAttribute(name, value === true ? '' : String(value));
    }
    node.append(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false));
    return node;
  }
  const el = (tag, attrs, ...children) => dress(document.createElement(tag), attrs, children);
  const svg = (tag, attrs, ...children) =>
    dress(document.createElementNS('http://www.w3.org/2000/svg', tag), attrs, children);

  // What a state looks like: shape and colour both tell it.
  function dot(kind, r = 5) {
    if (kind === 3) return svg('path', { class: 'mark s3', d: `M${-r * 0.6} ${-r * 0.6}L${r * 0.6} ${r * 0.6}M${r * 0.6} ${-r * 0.6}L${-r * 0.6} ${r * 0.6}` });
    if (kind === 4) return svg('rect', { class: 'mark s4', x: -r * 0.8, y: -r * 0.8, width: r * 1.6, height: r * 1.6, rx: 1 });
    const ring = svg('circle', { class: `mark s${kind}`, r: r * (kind ? 0.95 : 0.8) });
    return kind === 2 ? svg('g', null, svg('circle', { class: 'halo', r: r * 1.6 }), ring) : ring;
  }

  // -- words ---------------------------------------------------------------------------------------------

  const fmt = {
    number: (n) => (Number.isInteger(n) ? n.toLocaleString('en') : Number(n.toPrecision(4)).toString()),
    bytes(n) {
      const units = ['bytes', 'KiB', 'MiB', 'GiB', 'TiB'];
      let at = 0;
      while (n >= 1024 && at < units.length - 1) { n /= 1024; at += 1; }
      return `${at && n < 100 ? n.toFixed(2) : fmt.number(Math.round(n))} ${units[at]}`;
    },
    counted: (n, one) => `${fmt.number(n)} ${one}${n === 1 ? '' : 's'}`,
  };

  // -- sites ---------------------------------------------------------------------------------------------

  const LAYER = /(^|\.)(\d+)(?=[.:]|$)/;
  function layerIn(name) {
    const found = LAYER.exec(name);
    return found ? Number(found[2]) : null;
  }
  const layerOf = (site) => layerIn(names[site]);
  const family = (name) => name.replace(LAYER, '$1*'); // the same for all layers
  function inLayer(site, layer) { // the same place in another layer; undefined if there is none
    return numbers.get(names[site].replace(LAYER, `$1${layer}`));
  }

  function glob(pattern) {
    const tokens = pattern.match(/\*\*|[^]/g) || [];
    const parts = tokens.map((t) => ({ '**': '.*', '*': '[^.:]*', '?': '[^.:]' }[t]
      ?? t.replace(/[\\^$.*+?()[\]{}|]/g, '\\$&')));
    return new RegExp(`^${parts.join('')}(:[^:]*)?$`, 'i');
  }
  function said(filter) { // words, all of which fit; a word with * or ? is a pattern of whole names
    const tests = filter.trim().split(/\s+/).filter(Boolean).map((word) => {
      if (/[*?]/.test(word)) { const re = glob(word); return (name) => re.test(name); }
      const low = word.toLowerCase();
      return (name) => name.toLowerCase().includes(low);
    });
    return (name) => tests.every((t) => t(name));
  }
  let known = { key: null, marks: null, count: 0 };
  function matching() { // which sites the filters leave: {marks: Uint8Array, count}
    const key = JSON.stringify([state.filter, state.group, state.stage, state.kind]);
    if (known.key === key) return known;
    const fits = said(state.filter);
    const grouped = state.group ? new Set((page.groups || {})[state.group] || []) : null;
    const marks = new Uint8Array(names.length);
    let count = 0;
    for (let i = 0; i < names.length; i += 1) {
      const yes = (state.stage === null || page.sites.stage[i] === state.stage)
        && (state.kind === null || page.sites.state[i] === state.kind)
        && (grouped === null || grouped.has(i)) && fits(names[i]);
      if (yes) { marks[i] = 1; count += 1; }
    }
    known = { key, marks, count };
    return known;
  }

  // -- ranks ---------------------------------------------------------------------------------------------

  const axes = [...page.mesh.axes, ...(page.mesh.experts || [])];
  const first = page.mesh.first || 0;
  const mesh = {
    axes,
    first,
    coord: (rank, axis) => Math.floor((rank - first) / axis.stride) % axis.size,
    coords: (rank) => Object.fromEntries(axes.map((a) => [a.name, mesh.coord(rank, a)])),
    inWords: (rank) => axes.filter((a) => a.size > 1)
      .map((a) => `${a.name} ${mesh.coord(rank, a)}`).join(' · ') || 'the only rank',
  };

  // -- choosing ------------------------------------------------------------------------------------------

  function select(change) {
    const next = { ...change };
    if (Number.isInteger(next.site) && !('layer' in next)) next.layer = layerOf(next.site) ?? state.layer;
    if (Number.isInteger(next.layer) && !('site' in next) && state.site !== null && layerOf(state.site) !== null) {
      const moved = inLayer(state.site, next.layer);
      if (moved !== undefined) next.site = moved;
    }
    if ('site' in next && next.site !== state.site && !('part' in next)) next.part = null;
    const changed = new Set(Object.keys(next).filter((k) => k in state && next[k] !== state[k]));
    if (!changed.size) return;
    for (const name of changed) state[name] = next[name];
    tell(changed);
  }
  function tell(changed) {
    for (const one of panes) attempt(one, () => one.made && one.made.update(state, changed));
    for (const fn of listeners) fn(state, changed);
  }
  function attempt(one, work) { // a pane that cannot be drawn says so, and the others go on
    try {
      work();
      one.root.dataset.ready = '1';
    } catch (error) {
      one.made = null;
      one.root.append(el('p', { class: 'trouble', role: 'alert', text: `This cannot be drawn: ${error.message}` }));
      one.root.dataset.ready = '1';
      console.error(error);
    }
  }

  function pane(id, spec) { panes.push({ id, spec, made: null, root: document.getElementById(id) }); }
  function on(fn) { listeners.push(fn); }
  // -- the address: what is chosen can be bookmarked -----------------------------------------------------

  function remembered() {
    const said = new URLSearchParams(location.hash.slice(1)), out = {};
    const site = numbers.get(said.get('site')), rank = Number(said.get('rank') ?? NaN);
    if (site !== undefined) out.site = site;
    if (Number.isInteger(rank) && rank >= first && rank < first + page.mesh.ranks) out.rank = rank;
    return out;
  }
  function remember() {
    const said = new URLSearchParams();
    if (state.site !== null) said.set('site', names[state.site]);
    if (state.rank !== null) said.set('rank', state.rank);
    try { history.replaceState(null, '', `#${said}`); } catch { /* where there is no address */ }
  }

  function start() {
    const wanted = remembered(), opening = page.chosen >= 0 && !('site' in wanted) ? { site: page.chosen } : {};
    Object.assign(state, opening, wanted);
    if (state.site !== null) state.layer = layerOf(state.site);
    for (const one of panes) {
      if (one.spec.title) one.root.append(el('h2', { text: one.spec.title }));
      attempt(one, () => { one.made = one.spec.make(one.root) || { update() {} }; });
    }
    tell(new Set(Object.keys(state)));
    on((_, changed) => { if (changed.has('site') || changed.has('rank')) remember(); });
  }

  return {
    page, state, STATES, mesh, on, select, pane, start, el, svg, dot, fmt, family, layerIn, layerOf, inLayer, matching,
    site: (name) => numbers.get(name), name: (site) => names[site],
  };
})();
