'use strict';
// The ranks as a grid: which of them hold which part of the chosen site, and what a hook there would send.

flexPage.pane('mesh', {
  title: 'Mesh',
  make(root) {
    const { page, state, mesh, el, svg, fmt, select } = flexPage;
    const { sites } = page;
    const { parts, grid, tensor, colour, count } = flexParts;
    const EACH = 1024; // ranks that are elements of their own; more are drawn on a canvas
    const BESIDE = 366; // pixels that the tensor and the estimates take
    const MOST = 32; // ranks in the list beside a canvas
    const small = count <= EACH;
    let laid = null, hover = null, along = null; // a rank under the pointer, or an axis

    const caption = el('span', { class: 'caption' });
    root.querySelector('h2').append(caption);
    const field = el('div', { class: 'ranks', tabindex: '-1', onscroll: () => cue() });
    const more = el('p', { class: 'more', 'aria-hidden': 'true' });
    const told = el('p', { class: 'told', id: 'told', 'aria-live': 'polite' });
    const list = el('div', { class: 'found', role: 'listbox', 'aria-label': 'Ranks' });
    const side = el('div', { class: 'side', onscroll: () => fade() });
    const column = el('div', { class: 'field' }, field, more, told, list);
    const split = el('div', { class: 'split' }, column, side);
    root.append(split);
    const dark = () => getComputedStyle(document.documentElement).getPropertyValue('--dark').trim() === '1';
    const held = () => (state.site === null ? null : parts(state.site));

    // -- what each rank looks like -----------------------------------------------------------------------

    function looks() { // by rank a colour and how much of it: [fill, opacity]
      const found = held(), night = dark();
      const stages = flexParts.stageAxis ? flexParts.stageAxis.size : 1;
      const here = hover !== null && hover.part !== undefined ? hover.part : state.part;
      return (i) => {
        if (!found) {
          const stage = flexParts.stageAxis ? mesh.coord(mesh.first + i, flexParts.stageAxis) : 0;
          return [night ? 'oklch(0.68 0.025 240)' : 'oklch(0.83 0.025 240)', stages > 1 && stage % 2 ? (night ? 0.8 : 0.62) : 1];
        }
        const part = found.of[i];
        if (part < 0) return [night ? '#5a5f66' : '#b9bdc2', 0.3];
        return [colour(part, found.words.length, night), here === null || here === part ? 1 : 0.22];
      };
    }
    function groupOf(i) { // whether a rank is in the chosen rank's group along the axis that is pointed at
      if (along === null) return () => false;
      const all = page.mesh.axes.some((a) => a.name === along) ? page.mesh.axes
        : [...page.mesh.axes.filter((a) => a.name === 'pp'), ...(page.mesh.experts || [])];
      const rest = all.filter((a) => a.name !== along && a.size > 1);
      const want = rest.map((a) => mesh.coord(i, a));
      return (rank) => rest.every((a, n) => mesh.coord(rank, a) === want[n]);
    }
    function reference() { // the rank of which a group is shown
      const found = held();
      if (state.rank !== null && (!found || found.of[state.rank - mesh.first] >= 0)) return state.rank;
      return mesh.first + (found ? Math.max(0, found.of.findIndex((p) => p >= 0)) : 0);
    }

    // -- drawing -----------------------------------------------------------------------------------------

    let cells = [], plane = null;
    function build() {
      const all = split.clientWidth || 860, below = all < 470; // where the tensor goes below the ranks
      split.classList.toggle('below', below);
      const wide = below ? all - 40 : Math.max(200, all - BESIDE);
      laid = grid(wide, below ? 240 : Math.max(120, (split.clientHeight || 380) - (small ? 50 : 84)));
      column.style.flexBasis = below ? 'auto' : `${Math.min(wide, Math.max(190, laid.width + 8))}px`;
      requestAnimationFrame(cue);
      requestAnimationFrame(fade);
      caption.textContent = laid.words;
      if (!small) { plane = sheet(); return; }
      cells = [];
      const draw = svg('svg', {
        width: laid.width, height: laid.height, role: 'listbox', 'aria-label': `${fmt.counted(count, 'rank')}`,
        onclick: (e) => pick(e.target.closest('[data-rank]')), onkeydown: keys,
        onpointerover: (e) => point(e.target.closest('[data-rank]')), onpointerleave: () => point(null),
      });
      for (const tag of laid.tags) draw.append(svg('text', { class: 'tag', x: tag.x, y: tag.y, text: tag.text }));
      const inner = Math.max(2, laid.cell - (laid.cell > 8 ? 2.5 : 1));
      for (let i = 0; i < count; i += 1) {
        const rank = mesh.first + i;
        const cell = svg('g', {
          class: 'rank', 'data-rank': rank, role: 'option', tabindex: '-1', 'aria-label': `rank ${rank}: ${mesh.inWords(rank)}`,
          transform: `translate(${laid.x[i]} ${laid.y[i]})`,
        }, svg('rect', { width: inner, height: inner, rx: Math.min(4, inner / 5) }));
        if (laid.cell >= 8 + 8 * String(rank).length) cell.append(svg('text', { x: inner / 2, y: inner / 2 + 4.3, 'text-anchor': 'middle', text: rank }));
        cells.push(cell);
        draw.append(cell);
      }
      field.replaceChildren(draw);
    }
    function fade() { side.classList.toggle('below', side.scrollHeight - side.clientHeight - side.scrollTop > 2); }
    function cue() { // what is out of sight can be scrolled to, and one sees that
      const [down, right] = [field.scrollHeight - field.clientHeight, field.scrollWidth - field.clientWidth];
      const below = down - field.scrollTop > 2, beside = right - field.scrollLeft > 2;
      field.classList.toggle('below', below);
      more.textContent = [down > 2 && '↕', right > 2 && '↔'].filter(Boolean).length ? `scroll ${[down > 2 && (below ? 'down ↓' : 'up ↑'), right > 2 && (beside ? 'right →' : 'left ←')].filter(Boolean).join(', ')} for more ranks` : '';
      more.hidden = !more.textContent;
    }
    function sheet() {
      const one = el('canvas', {
        tabindex: '0', role: 'application', 'aria-label': `${fmt.counted(count, 'rank')}; arrows walk, Enter chooses`,
        onclick: (e) => { const i = under(e); if (i !== null) select({ rank: mesh.first + i }); },
        onpointermove: (e) => { const i = under(e); point(i === null ? null : { dataset: { rank: mesh.first + i } }); },
        onpointerleave: () => point(null), onkeydown: keys,
      });
      field.replaceChildren(one);
      return one;
    }
    function under(event) {
      const box = plane.getBoundingClientRect(), [x, y] = [event.clientX - box.left, event.clientY - box.top];
      for (let i = 0; i < count; i += 1) {
        if (x >= laid.x[i] && x < laid.x[i] + laid.cell && y >= laid.y[i] && y < laid.y[i] + laid.cell) return i;
      }
      return null;
    }
    function paint() {
      if (!laid) build();
      const look = looks(), grouped = groupOf(reference());
      if (small) {
        const at = state.rank === null ? mesh.first : state.rank;
        cells.forEach((cell, i) => {
          const [fill, alpha] = look(i), rank = mesh.first + i;
          cell.firstChild.style.fill = fill;
          cell.firstChild.style.fillOpacity = rank === state.rank ? 1 : alpha;
          cell.classList.toggle('away', alpha < 0.5);
          cell.classList.toggle('group', grouped(rank));
          cell.setAttribute('aria-selected', String(rank === state.rank));
          cell.setAttribute('tabindex', rank === at ? '0' : '-1');
        });
        return;
      }
      const scale = window.devicePixelRatio || 1, ctx = plane.getContext('2d');
      plane.width = laid.width * scale;
      plane.height = laid.height * scale;
      plane.style.width = `${laid.width}px`;
      plane.style.height = `${laid.height}px`;
      ctx.scale(scale, scale);
      const style = getComputedStyle(root), ink = style.getPropertyValue('--ink'), quiet = style.getPropertyValue('--quiet');
      const inner = laid.cell - (laid.cell > 5 ? 1.5 : 0.7);
      for (let i = 0; i < count; i += 1) {
        const [fill, alpha] = look(i);
        ctx.globalAlpha = alpha;
        ctx.fillStyle = fill;
        ctx.fillRect(laid.x[i], laid.y[i], inner, inner);
        if (along !== null && grouped(mesh.first + i)) {
          ctx.globalAlpha = 1;
          ctx.strokeStyle = ink;
          ctx.strokeRect(laid.x[i] - 0.5, laid.y[i] - 0.5, inner + 1, inner + 1);
        }
      }
      ctx.globalAlpha = 1;
      ctx.fillStyle = quiet;
      ctx.font = `12px ${style.getPropertyValue('--sans')}`;
      for (const tag of laid.tags) ctx.fillText(tag.text, tag.x, tag.y);
      if (state.rank !== null) {
        const i = state.rank - mesh.first;
        ctx.strokeStyle = ink;
        ctx.lineWidth = 2;
        ctx.strokeRect(laid.x[i] - 2, laid.y[i] - 2, inner + 4, inner + 4);
      }
    }
    function beside() { // of a canvas: ranks as a list that can be walked and read out
      if (small) return;
      const found = held(), out = [];
      const fits = (i) => (found ? found.of[i] >= 0 && (state.part === null || found.of[i] === state.part) : true);
      for (let i = 0; i < count && out.length < MOST; i += 1) if (fits(i)) out.push(mesh.first + i);
      if (state.rank !== null && !out.includes(state.rank)) out.unshift(state.rank);
      list.replaceChildren(...out.map((rank, n) => el('button', {
        class: 'plain', role: 'option', tabindex: n ? '-1' : '0', 'data-rank': rank, text: String(rank), title: mesh.inWords(rank),
        'aria-selected': String(rank === state.rank), onclick: () => select({ rank }),
      })));
      list.onkeydown = keys;
    }

    // -- the chosen tensor, and what hooks send ----------------------------------------------------------

    function besides() {
      side.replaceChildren();
      requestAnimationFrame(fade);
      if (state.site === null) {
        side.append(el('p', { class: 'quiet', text: 'Choose a site to see how its tensor is sharded, and what a hook there would send.' }));
        return;
      }
      const found = held();
      if (found.picture) {
        const drawn = tensor(found, dark(), side.clientWidth || 300);
        drawn.addEventListener('pointerover', (e) => { const one = e.target.closest('[data-part]'); hover = one && { part: Number(one.dataset.part) }; paint(); });
        drawn.addEventListener('pointerleave', () => { hover = null; paint(); });
        drawn.addEventListener('click', (e) => { const one = e.target.closest('[data-part]'); if (one) choosePart(Number(one.dataset.part)); });
        drawn.addEventListener('keydown', pieces);
        side.append(drawn);
        const notes = [found.picture.summed && 'Each rank has a partial sum; the full tensor is their sum.', found.picture.more.length && `${found.picture.more.join(', ')} sharded too, and not drawn.`].filter(Boolean);
        if (notes.length) side.append(el('p', { class: 'quiet', text: notes.join(' ') }));
      } else side.append(el('p', { class: 'quiet', text: page.layouts[sites.layout[state.site]].words === 'known when the model runs' ? 'How this tensor is sharded is known when the model runs.' : 'Sharded into more parts than can be drawn.' }));
      side.append(estimates(), el('span'));
      mark();
    }
    function choosePart(part) { select({ part: state.part === part ? null : part }); }
    function pieces(event) {
      const at = event.target.closest('[data-part]');
      if (!at) return;
      const all = [...side.querySelectorAll('[data-part]')], by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (event.key === 'Enter' || event.key === ' ') { event.preventDefault(); choosePart(Number(at.dataset.part)); }
      if (by) { event.preventDefault(); const next = all[all.indexOf(at) + by]; if (next) next.focus(); }
    }
    function mark() { // the parts that the chosen rank holds, or that were chosen
      const found = held();
      if (!found) return;
      const rank = hover && hover.rank !== undefined ? hover.rank : state.rank;
      const mine = rank === null ? null : found.of[rank - mesh.first];
      for (const one of side.querySelectorAll('[data-part]')) {
        const part = Number(one.dataset.part);
        one.setAttribute('aria-selected', String(part === state.part || part === mine));
        one.classList.toggle('away', mine !== null && part !== mine);
      }
    }
    function estimates() {
      const estimate = sites.estimate[state.site] < 0 ? null : page.estimates[sites.estimate[state.site]];
      if (!estimate) return el('p', { class: 'quiet', text: sites.state[state.site] === 3 ? 'No hook can be registered here.' : 'What a hook here would send is not known.' });
      return el('div', { class: 'estimates' }, [['read', 'Cost of a capture here'], ['edit', 'Cost of an edit of the full tensor']].map(([name, words]) => one(words, estimate[name])));
    }
    function one(words, told_) {
      if (!told_) return null;
      if (told_.why) return el('div', null, el('h3', { text: words }), el('p', { class: 'quiet', text: told_.why }));
      const rows = told_.sent.map(([op, axis, ranks, nbytes, backward]) => el('tr', {
        tabindex: '0', onpointerenter: () => lead(axis), onpointerleave: () => lead(null), onfocus: () => lead(axis), onblur: () => lead(null),
      }, el('td', null, el('code', { text: op })), el('td', { text: `${axis} × ${ranks}` }), el('td', { class: 'n', text: fmt.bytes(nbytes) }), el('td', { class: 'quiet', text: backward ? 'backward' : 'forward' })));
      const links = Object.entries(told_.leader || {}).map(([link, n]) => `${fmt.bytes(n)} ${link}`).join(', ');
      return el('div', null, el('h3', { text: words }),
        rows.length ? el('table', { 'aria-label': words }, el('tbody', null, rows)) : el('p', { text: 'No collective communication.' }),
        el('p', { class: 'quiet', text: `full tensor ${fmt.bytes(told_.whole)}, shard ${fmt.bytes(told_.part)}${links ? `; first rank of the stage: ${links}` : ''}` }));
    }
    function lead(axis) { along = axis; paint(); }

    // -- pointer and keys --------------------------------------------------------------------------------

    function point(target) {
      const rank = target ? Number(target.dataset.rank) : null;
      hover = rank === null ? null : { rank };
      say(rank === null ? state.rank : rank);
      mark();
    }
    function say(rank) {
      if (rank === null) { told.textContent = ' '; return; }
      const found = held(), part = found ? found.of[rank - mesh.first] : -1;
      const holds = !found ? '' : part < 0 ? 'has nothing of this site: another stage' : !found.known ? '' : found.words.length === 1 ? 'holds the full tensor' : `holds part ${part + 1} of ${found.words.length}`;
      told.textContent = `rank ${rank}:  ${mesh.inWords(rank)}${holds ? `  ·  ${holds}` : ''}`;
    }
    function pick(target) { if (target) select({ rank: Number(target.dataset.rank) }); }
    const ARROWS = { ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0] };
    let walked = null;
    function keys(event) {
      const at = event.target.dataset.rank !== undefined ? Number(event.target.dataset.rank) : walked ?? state.rank ?? mesh.first;
      if (event.key === 'Enter' || event.key === ' ') { event.preventDefault(); select({ rank: at }); return; }
      const by = ARROWS[event.key];
      if (!by) return;
      event.preventDefault();
      if (event.currentTarget === list) {
        const next = by[0] + by[1] > 0 ? event.target.nextElementSibling : event.target.previousElementSibling;
        if (next) next.focus();
        return;
      }
      walked = nearest(at - mesh.first, by) + mesh.first;
      if (small) cells[walked - mesh.first].focus();
      else select({ rank: walked });
      say(walked);
    }
    function nearest(from, [dx, dy]) {
      let best = from, least = Infinity;
      for (let i = 0; i < count; i += 1) {
        const [x, y] = [laid.x[i] - laid.x[from], laid.y[i] - laid.y[from]];
        const forward = x * dx + y * dy, across = Math.abs(x * dy) + Math.abs(y * dx);
        const far = forward + 20 * across;
        if (forward > 0.5 && far < least) { least = far; best = i; }
      }
      return best;
    }

    flexTheme.onChange(() => { if (laid) { besides(); paint(); } });
    let width = 0;
    let height = 0;
    new ResizeObserver(() => {
      if (split.clientWidth === width && Math.abs(split.clientHeight - height) < 2) return;
      if (split.clientWidth !== width) requestAnimationFrame(besides); // the tensor is as wide as there is room
      [width, height] = [split.clientWidth, split.clientHeight];
      build();
      paint();
    }).observe(split);
    build();
    return {
      update(_, changed) {
        if (changed.has('site')) { hover = null; along = null; besides(); }
        if (['site', 'rank', 'part'].some((n) => changed.has(n))) { paint(); beside(); say(state.rank); mark(); }
      },
    };
  },
});
