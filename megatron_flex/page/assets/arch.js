'use strict';
// The architecture: blocks along the residual stream, sites as dots; zoomed and walked. Only what is seen is drawn.

flexPage.pane('architecture', {
  title: 'Architecture',
  make(root) {
    const { page, state, STATES, el, svg, dot, fmt, select, matching } = flexPage;
    const { sites } = page;
    const tree = flexTree, { PAD, HEAD, ROW, LETTERS } = tree, { strip } = flexStrip;
    const LEAST = 0.02, MOST = 4; // scales
    const FAR = 12 / LETTERS; // below it letters would be smaller than 12 pixels, and dots are drawn without names
    const narrow = matchMedia('(max-width: 1000px)'); // panes below each other: the page scrolls, not the pane
    const SOME = 24; // rows that are drawn together, of a block with many
    const places = new Map(); // of nested folds, which member is shown
    const view = { x: 0, y: 0, k: 1 };
    const wrong = new Map(); // sites that differ between two dumps
    for (const [site, , error, tolerance, , odd] of (page.divergence || { rows: [] }).rows) {
      if (odd || error > tolerance) wrong.set(site, true);
    }
    flexStrip.wrong = wrong;
    let scene = null, drawn = new Map(), tabbed = null, moved = false;

    const spine = svg('path', { class: 'spine' });
    const world = svg('g', null, spine);
    const canvas = svg('svg', {
      id: 'canvas', role: 'group', 'aria-label': 'Blocks of the model with sites as dots; arrows walk, Enter chooses',
      onwheel: wheel, onpointerdown: grab, onclick: click, onkeydown: key,
    }, world);
    const button = (text, words, act) => el('button', { class: 'plain', 'aria-label': words, title: words, text, onclick: act });
    root.querySelector('h2').append(el('span', { class: 'buttons' },
      button('−', 'Zoom out (-)', () => zoom(1 / 1.35)), button('+', 'Zoom in (+)', () => zoom(1.35)),
      button('⤢', 'Show all of it (0)', () => { fit(); render(); })));
    const scale = flexStrip.scale(() => redraw());
    root.append(canvas, scale.root, flexPage.legend());
    flexPage.stepLayer = stepLayer;
    let wide = 0;
    new ResizeObserver(() => {
      if (!canvas.clientWidth) return;
      if (canvas.clientWidth !== wide) { wide = canvas.clientWidth; place(); redraw(); } // dots are wrapped to the width
      if (!moved) fit();
      render();
    }).observe(canvas);
    document.addEventListener('keydown', (event) => {
      if (/^(input|select|textarea)$/i.test(event.target.tagName) || event.ctrlKey || event.metaKey) return;
      if (event.key === '+' || event.key === '=') zoom(1.35);
      if (event.key === '-') zoom(1 / 1.35);
      if (event.key === '0') { fit(); render(); }
    });

    // -- where things are --------------------------------------------------------------------------------

    function place() {
      const shape = (canvas.clientWidth || 800) / (canvas.clientHeight || 600);
      const edge = edges();
      scene = tree.scene(tree.blocks, places, shape, (canvas.clientWidth || 800) - 2 * edge - 8);
      canvas.style.height = narrow.matches ? `${Math.min(2400, Math.max(260, scene.height + 2 * edge))}px` : '';
    }
    const edges = () => ((canvas.clientWidth || 800) < 420 ? 10 : 24);
    function fit() {
      const w = canvas.clientWidth || 800, h = canvas.clientHeight || 600, edge = edges();
      const all = Math.min((w - 2 * edge) / scene.width, (h - 2 * edge) / scene.height);
      const legible = Math.max(all, FAR); // names can be read; what does not fit is dragged into view
      view.k = Math.max(LEAST, Math.min(1.15, tree.blocks.some((b) => b.open) && all < 0.6 ? all : legible));
      view.x = Math.max(edge, (w - scene.width * view.k) / 2);
      view.y = Math.max(edge * 0.7, (h - scene.height * view.k) / 2);
      moved = false;
    }
    function zoom(by, x = canvas.clientWidth / 2, y = canvas.clientHeight / 2) {
      const k = Math.max(LEAST, Math.min(MOST, view.k * by));
      view.x = x - ((x - view.x) * k) / view.k;
      view.y = y - ((y - view.y) * k) / view.k;
      view.k = k;
      moved = true;
      render();
    }
    function reveal(x, y) { // bring a point of the world into view
      const [sx, sy] = [view.x + x * view.k, view.y + y * view.k], edge = 30;
      if (sx < edge || sx > canvas.clientWidth - edge) view.x = canvas.clientWidth / 2 - x * view.k;
      if (sy < edge || sy > canvas.clientHeight - edge) view.y = canvas.clientHeight / 2 - y * view.k;
    }

    // -- drawing -----------------------------------------------------------------------------------------

    function render() {
      if (!scene) return;
      const focused = walked();
      const far = view.k < FAR;
      const seen = new Map();
      const [left, top] = [-view.x / view.k, -view.y / view.k];
      const [right, bottom] = [left + canvas.clientWidth / view.k, top + canvas.clientHeight / view.k];
      scene.boxes.forEach((box, n) => {
        if (box.x > right || box.x + box.w < left || box.y > bottom || box.y + box.h < top) return;
        const inner = box.y + HEAD + (box.strip || 0), few = far || box.h < 3 * SOME * ROW;
        const from = few ? 0 : Math.max(0, Math.floor((top - inner) / ROW / SOME) - 1) * SOME;
        const to = few ? Infinity : Math.max(0, Math.ceil((bottom - inner) / ROW / SOME) + 1) * SOME;
        const name = `${n}${far ? `f${view.k.toFixed(3)}` : `n${from}-${to}`}`;
        seen.set(name, drawn.get(name) || box_(box, far, from, to));
      });
      spine.setAttribute('d', scene.spine);
      world.setAttribute('transform', `translate(${view.x} ${view.y}) scale(${view.k})`);
      for (const [name, node] of drawn) if (!seen.has(name)) node.remove();
      for (const [name, node] of seen) if (!drawn.has(name)) world.append(node);
      drawn = seen;
      rove();
      refocus(focused);
    }
    const walked = () => (canvas.contains(document.activeElement) ? { ...document.activeElement.dataset } : null);
    function refocus(was) { // what had the keyboard before it was drawn anew
      if (!was || canvas.contains(document.activeElement)) return;
      const again = find('data-site', was.site) || find('data-layer', was.layer) || find('data-member', was.member) || find('data-open', was.open);
      if (again) again.focus({ preventScroll: true });
    }
    const find = (name, value) => (value === undefined ? null : canvas.querySelector(`[${name}="${CSS.escape(value)}"]`));
    function redraw() {
      const focused = walked();
      for (const node of drawn.values()) node.remove();
      drawn = new Map();
      render();
      refocus(focused);
    }

    function box_(box, far, from, to) {
      const { block } = box, single = block.stack && (block.open || block.members.length === 1) && !box.head;
      const chosen = box.node && state.layer !== null && block.stack && Number(box.node.label) === state.layer;
      const group = svg('g', { class: `box${chosen && block.open ? ' chosen' : ''}`, transform: `translate(${box.x} ${box.y})` });
      if (single) { group.dataset.layer = box.node.label; if (chosen) group.setAttribute('aria-current', 'true'); }
      if (!box.head) {
        if (block.stack && !block.open && block.members.length > 1) {
          for (const by of [8, 4]) group.append(svg('rect', { class: 'behind', x: by, y: by, width: box.w, height: box.h, rx: 8 }));
        }
        group.append(svg('rect', { class: 'card', width: box.w, height: box.h, rx: 8 }));
      }
      group.append(title(box, single, far));
      const y = HEAD + (box.strip || 0);
      if (box.strip && !far) group.append(strip(block.members, block.at, PAD, HEAD + 1, box.w - 2 * PAD, null, scale));
      if (far) {
        group.append(...specks(box, y));
        const large = Math.min(box.w, box.h) * 0.42;
        if (single && large * view.k >= 12) group.append(svg('text', { class: 'number', x: box.w / 2, y: box.h / 2, 'font-size': large, text: box.node.label }));
        return group;
      }
      const { marks } = matching();
      for (const row of box.rows.filter((r) => r.strip || (r.y >= from * ROW && r.y < to * ROW))) {
        if (row.label) group.append(svg('text', { class: 'module', x: PAD + row.x, y: y + row.y + ROW / 2 + 4, text: row.label }));
        for (const one of row.dots) group.append(site(one, PAD + one.x, y + one.y + ROW / 2, marks[one.site]));
        if (row.strip) group.append(strip(row.strip.members, row.strip.at, PAD + row.x, y + row.y + ROW, row.strip.wide, row.strip.key, scale));
      }
      return group;
    }

    function title(box, single, far) {
      const { block } = box, by = far ? 1 / view.k : 1; // from afar in letters that stay as they are, where they fit
      if (far && single) return svg('g'); // its number is drawn large
      const words = single ? `${block.title && `${block.title}.`}${box.node.label}` : block.title;
      const head = svg('text', { class: 'title', transform: `translate(${box.head ? 0 : PAD} 19) scale(${by})` }, words);
      if (far && !box.head && words.length * 8 * by > box.w - 2 * PAD) return svg('g');
      if (block.stack && !single) {
        head.append(svg('tspan', { class: 'count', dx: 7, text: `${block.words} × ${block.members.length}` }));
        if (!block.open) head.append(svg('tspan', { class: 'which', dx: 9, text: `layer ${box.node.label}` }));
        const opener = svg('g', {
          class: 'opener', role: 'button', tabindex: '0', 'data-open': block.title || 'layers', 'aria-expanded': String(block.open),
          'aria-label': block.open ? 'Fold the layers' : 'Open the layers', transform: `translate(${box.w - (box.head ? 0 : 10)} ${far ? 24 : 6}) scale(${by}) translate(-44 ${far ? -18 : 0})`,
        }, svg('rect', { width: 44, height: 19, rx: 9 }), svg('text', { x: 22, y: 14, text: block.open ? 'fold' : 'open' }));
        opener.flexOpen = block;
        return svg('g', null, head, opener);
      }
      return head;
    }

    function site({ site: number, text }, x, y, fits) {
      const kind = sites.state[number], chosen = number === state.site;
      const name = sites.name[number];
      const why = sites.reason[number] >= 0 ? `: ${page.reasons[sites.reason[number]]}` : '';
      const node = svg('g', {
        class: `dot${chosen ? ' chosen' : ''}${fits ? '' : ' dim'}${wrong.has(number) ? ' wrong' : ''}`,
        transform: `translate(${x} ${y})`, role: 'option', tabindex: '-1', 'data-site': name, 'aria-selected': String(chosen),
        'aria-label': `${name}, ${STATES[kind]}${why}, ${page.layouts[sites.layout[number]].words}`,
      }, svg('rect', { class: 'hit', x: -9, y: -9.5, width: 16 + tree.wide(text) + 9, height: 19, rx: 9 }));
      if (wrong.has(number)) node.append(svg('circle', { class: 'differs', r: page.divergence.first === number ? 10 : 7.5 }));
      node.append(dot(kind), svg('text', { class: 'point', x: wrong.has(number) ? 13 : 9, y: 4.2, text }));
      node.append(svg('title', { text: `${name}\n${STATES[kind]}${why}${(page.hooks[number] || []).map((h) => `\n${h}`).join('')}` }));
      return node;
    }

    function specks(box, y) { // all dots of a block, each state one path of round strokes
      const { marks } = matching(), paths = new Map();
      for (const row of box.rows) {
        for (const one of row.dots) {
          const kind = wrong.has(one.site) ? 'wrong' : `s${sites.state[one.site]}`;
          const name = `${kind}${marks[one.site] ? '' : ' dim'}`;
          paths.set(name, `${paths.get(name) || ''}M${PAD + one.x} ${y + one.y + ROW / 2}h0`);
        }
      }
      return [...paths].map(([name, d]) => svg('path', { class: `specks ${name}`, d }));
    }

    function rove() { // one dot can be tabbed to
      const dots = canvas.querySelectorAll('[data-site]');
      tabbed = find('data-site', state.site === null ? undefined : sites.name[state.site]) || dots[0] || null;
      if (tabbed) tabbed.setAttribute('tabindex', '0');
    }

    // -- pointer and keys --------------------------------------------------------------------------------

    function wheel(event) {
      event.preventDefault();
      const at = canvas.getBoundingClientRect();
      const lines = event.deltaMode === 1 ? 24 : 1;
      zoom(Math.exp(-Math.max(-240, Math.min(240, event.deltaY * lines)) * 0.0022), event.clientX - at.left, event.clientY - at.top);
    }
    let dragged = false;
    function grab(event) {
      if (event.button !== 0) return;
      const from = { x: event.clientX, y: event.clientY, vx: view.x, vy: view.y };
      dragged = false;
      const drag = (e) => {
        if (Math.hypot(e.clientX - from.x, e.clientY - from.y) > 4) dragged = moved = true;
        if (!dragged) return;
        view.x = from.vx + e.clientX - from.x;
        view.y = from.vy + e.clientY - from.y;
        render();
      };
      const done = () => { window.removeEventListener('pointermove', drag); window.removeEventListener('pointerup', done); };
      window.addEventListener('pointermove', drag);
      window.addEventListener('pointerup', done);
    }
    function click(event) { if (!dragged) act(event.target.closest('[data-site], .cell, .opener, [data-layer]')); }
    function act(target) {
      if (!target) return;
      if (target.dataset.site !== undefined) select({ site: flexPage.site(target.dataset.site) });
      else if (target.flexOpen) toggle(target.flexOpen);
      else if (target.flexMember) member(target.flexMember, target.flexMember.n);
      else layer(Number(target.dataset.layer));
    }
    function toggle(block) { block.open = !block.open; place(); fit(); redraw(); }
    function member({ members, key }, n) {
      const one = members[Math.max(0, Math.min(members.length - 1, n))];
      if (key === null) { layer(Number(one.label)); return; }
      places.set(key, members.indexOf(one));
      place();
      redraw();
      focusOn('data-member', one.label);
    }
    function layer(number) {
      const strip = document.activeElement.closest('.strip');
      select({ layer: number });
      if (strip) focusOn('data-layer', number);
    }
    function focusOn(name, value) { const one = find(name, value); if (one) one.focus({ preventScroll: true }); }
    function stepLayer(by) {
      const all = tree.blocks.filter((b) => b.stack).flatMap((b) => b.members.map((m) => Number(m.label)));
      const sorted = [...new Set(all)].sort((a, b) => a - b);
      const at = sorted.indexOf(state.layer);
      const next = sorted[Math.max(0, Math.min(sorted.length - 1, at < 0 ? 0 : at + by))];
      if (next !== undefined) layer(next);
    }
    const ARROWS = { ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0] };
    function key(event) {
      const at = event.target;
      if (event.key === 'Enter' || event.key === ' ') { event.preventDefault(); act(at.closest('[data-site], .cell, .opener')); return; }
      const by = ARROWS[event.key];
      if (!by && event.key !== 'Home' && event.key !== 'End') return;
      if (at.flexMember) {
        event.preventDefault();
        const { members, n, per } = at.flexMember;
        member(at.flexMember, by ? n + by[0] + by[1] * per : event.key === 'Home' ? 0 : members.length - 1);
      } else if (at.dataset.site !== undefined && by) { event.preventDefault(); walk(at, by); }
    }
    function walk(from, [dx, dy]) { // to the nearest dot in that direction
      const here = from.getBoundingClientRect();
      let best = null, least = Infinity;
      for (const one of canvas.querySelectorAll('[data-site]')) {
        const there = one.getBoundingClientRect();
        const [x, y] = [there.left - here.left, there.top - here.top];
        const along = x * dx + y * dy, across = Math.abs(x * dy) + Math.abs(y * dx);
        const far = (dx ? along : Math.round(along) * 1e4) + across;
        if (along > 2 && far < least && (!dx || across < 3)) { best = one; least = far; }
      }
      if (!best) return;
      from.setAttribute('tabindex', '-1');
      best.setAttribute('tabindex', '0');
      best.focus({ preventScroll: true });
      const box = best.getBoundingClientRect(), frame = canvas.getBoundingClientRect();
      reveal((box.left - frame.left - view.x) / view.k, (box.top - frame.top - view.y) / view.k);
      render();
    }

    // -- what is chosen ----------------------------------------------------------------------------------

    function show(number) { // make the block that has a site show it
      for (const block of tree.blocks) {
        const n = block.members.findIndex((m) => tree.inside(m).includes(number));
        if (n < 0) continue;
        if (block.stack) block.at = n;
        for (const [name, value] of Object.entries(tree.way(block.members[n], number))) places.set(name, value);
        return;
      }
    }
    function whereIs(number) {
      for (const box of scene.boxes) {
        if (!box.node || !tree.inside(box.node).includes(number)) continue;
        for (const row of box.rows) {
          for (const one of row.dots) {
            if (one.site === number) return [box.x + PAD + one.x, box.y + HEAD + (box.strip || 0) + one.y + ROW / 2];
          }
        }
      }
      return null;
    }

    place();
    fit();
    flexTheme.onChange(() => { scale.update(); redraw(); });
    return {
      update(_, changed) {
        if (changed.has('layer') && state.layer !== null) {
          for (const block of tree.blocks.filter((b) => b.stack)) {
            const n = block.members.findIndex((m) => Number(m.label) === state.layer);
            if (n >= 0) block.at = n;
          }
        }
        if (changed.has('site') && state.site !== null) show(state.site);
        if (changed.has('site') || changed.has('layer')) place();
        if (changed.has('site') && state.site !== null) {
          const at = whereIs(state.site);
          if (at) reveal(...at);
        }
        if (['site', 'source', 'iteration'].some((n) => changed.has(n))) scale.update();
        if (['site', 'layer', 'filter', 'group', 'stage', 'kind', 'source', 'iteration'].some((n) => changed.has(n))) redraw();
        canvas.setAttribute('data-shown', fmt.counted(drawn.size, 'block'));
      },
    };
  },
});
