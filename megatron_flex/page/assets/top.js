'use strict';
// Above the panes: what this is of, finding sites, light and dark, help, keys. And what is said of the chosen site.

(() => {
  const { page, state, STATES, el, fmt, select, on, matching, mesh } = flexPage;
  const { sites } = page;
  const MOST = 60; // names that finding lists
  const byId = (id) => document.getElementById(id);

  // -- what this is of -----------------------------------------------------------------------------------

  const said = (axes) => axes.filter((a) => a.size > 1).map((a) => `${a.name} ${a.size}`).join(' × ');
  byId('title').textContent = page.title;
  byId('about').textContent = [
    fmt.counted(sites.name.length, 'site'),
    fmt.counted(page.mesh.ranks, 'rank'),
    said(page.mesh.axes),
    said(page.mesh.experts || []) && `experts ${said(page.mesh.experts)}`,
  ].filter(Boolean).join('  ·  ');
  const panes = document.querySelector('main').classList;
  panes.toggle('bare', !page.data.length && !page.divergence); // there is nothing to draw in the data pane
  panes.toggle('lone', !sites.name.length); // there is in no other
  panes.toggle('single', page.mesh.ranks === 1); // a mesh of one rank is no picture
  for (const note of page.notes) byId('notes').append(el('p', { class: `note ${note.kind}`, text: note.text }));

  // -- finding -------------------------------------------------------------------------------------------

  const input = el('input', {
    id: 'filter', type: 'search', placeholder: 'Find sites: fc1, layers.*:output', spellcheck: 'false',
    autocomplete: 'off', 'aria-label': 'Filter sites by name or pattern', 'aria-controls': 'found',
    oninput: () => select({ filter: input.value }),
    onfocus: () => list(true),
    onkeydown: (event) => {
      if (event.key === 'ArrowDown') { event.preventDefault(); list(true); (found.querySelector('[role=option]') || input).focus(); }
      if (event.key === 'Enter') { const one = found.querySelector('[role=option]'); if (one) one.click(); }
      if (event.key === 'Escape') { input.value = ''; select({ filter: '' }); list(false); input.blur(); event.stopPropagation(); }
    },
  });
  const found = el('div', { id: 'found', role: 'listbox', 'aria-label': 'Sites found', hidden: true, onkeydown: walk });
  const tally = el('span', { id: 'tally', 'aria-live': 'polite' });
  const choice = (name, words, options, read) => el('select', {
    id: name, 'aria-label': words, onchange: (event) => select({ [name]: read(event.target.value) }),
  }, el('option', { value: '', text: words }), options.map(([value, text]) => el('option', { value, text })));
  const stages = [...new Set(sites.stage)].sort((a, b) => a - b);
  const kinds = [...new Set(sites.state)].sort();
  byId('finding').append(...[
    el('div', { class: 'find' }, input, tally, found),
    kinds.length > 1 ? choice('kind', 'any state', kinds.map((k) => [k, STATES[k]]), (v) => (v === '' ? null : Number(v))) : null,
    stages.length > 1 ? choice('stage', 'any stage', stages.map((s) => [s, `stage ${s}`]), (v) => (v === '' ? null : Number(v))) : null,
    Object.keys(page.groups || {}).length ? choice('group', 'any group', Object.keys(page.groups).map((t) => [t, t]), (v) => v) : null,
  ].filter(Boolean));

  function list(open) {
    const { marks, count } = matching();
    const filtered = count < sites.name.length;
    tally.textContent = filtered ? `${fmt.number(count)} of ${fmt.number(sites.name.length)}` : '';
    found.hidden = !open || !state.filter;
    found.replaceChildren();
    if (found.hidden) return;
    for (let i = 0, shown = 0; i < marks.length && shown < MOST; i += 1) {
      if (!marks[i]) continue;
      shown += 1;
      found.append(el('div', {
        role: 'option', tabindex: '-1', class: `s${sites.state[i]}`, 'aria-selected': String(i === state.site),
        text: sites.name[i], onclick: (event) => { select({ site: i }); found.hidden = true; event.currentTarget.blur(); }, // hidden, it would keep the keys until the next frame
      }));
    }
    if (count > MOST) found.append(el('p', { class: 'quiet', text: `and ${fmt.number(count - MOST)} more` }));
    if (!count) found.append(el('p', { class: 'quiet', text: 'No site has such a name.' }));
  }
  function walk(event) {
    const at = document.activeElement;
    const to = { ArrowDown: at.nextElementSibling, ArrowUp: at.previousElementSibling || input }[event.key];
    if (to && (to === input || to.getAttribute('role') === 'option')) { event.preventDefault(); to.focus(); }
    if (event.key === 'Enter') at.click();
    if (event.key === 'Escape') { found.hidden = true; input.focus(); event.stopPropagation(); }
  }
  document.addEventListener('pointerdown', (event) => { if (!event.target.closest('.find')) found.hidden = true; });

  // -- the chosen site -----------------------------------------------------------------------------------

  flexPage.pane('chosen', {
    make(root) {
      return { update() { root.replaceChildren(...told()); } };
    },
  });

  function told() {
    const site = state.site;
    if (site === null) {
      return [el('p', { class: 'quiet', text: 'Choose a dot to see its layout, which rank holds which part, and what was recorded there. Press ? for keys.' })];
    }
    const [module, point = ''] = sites.name[site].split(/:(?=[^:]*$)/);
    const reason = sites.reason[site] >= 0 ? page.reasons[sites.reason[site]] : '';
    const rows = [
      ['full shape', page.shapes[sites.shape[site]]],
      ['layout', page.layouts[sites.layout[site]].words],
      ['stage', String(sites.stage[site]) + (sites.chunk[site] ? `, chunk ${sites.chunk[site]}` : '')],
    ];
    const hooks = (page.hooks[site] || []).join('; ');
    if (hooks) rows.push(['hooks', hooks]);
    return [
      el('div', { class: 'name' },
        el('span', { class: `badge s${sites.state[site]}`, text: STATES[sites.state[site]] }),
        el('code', null, module, el('b', { text: point && `:${point}` })),
        el('button', { class: 'plain', 'aria-label': 'Choose no site', title: 'Choose no site (Escape)', text: '×', onclick: () => select({ site: null }) })),
      el('dl', null, rows.map(([term, words]) => el('div', null, el('dt', { text: term }), el('dd', { text: words })))),
      reason ? el('p', { class: 'why', text: reason }) : null,
      el('p', { class: 'quiet last' }, flexCopy.buttons(site), state.rank !== null ? `rank ${state.rank}: ${mesh.inWords(state.rank)}` : ''),
    ].filter(Boolean);
  }

  // -- help, keys ----------------------------------------------------------------------------------------

  const help = byId('help');
  const showHelp = () => (help.open ? help.close() : help.showModal());
  byId('tools').append(el('button', { id: 'ask', class: 'plain', 'aria-label': 'Help', title: 'Help (?)', text: '?', onclick: showHelp }));

  const KEYS = [
    ['/', 'find sites'], ['Tab', 'to the next pane or control'], ['arrows', 'walk over dots, layers or ranks'],
    ['Enter', 'choose what is walked to'], ['[  ]', 'the previous layer, the next layer'],
    ['{  }', 'the previous site, the next site'], ['+  −  0', 'zoom the architecture; all of it'],
    ['Escape', 'choose nothing'], ['t', 'light, dark, as the system'], ['?', 'this'],
  ];
  const DOTS = [
    [0, 'a hook can be registered here'], [1, 'a hook is registered here'], [2, 'its hook was called, or the dump or statistics have it'],
    [3, 'no hook can be registered: choose it to read why'], [4, 'can be read, not edited'],
  ];
  const mark = (kind) => flexPage.svg('svg', { width: 18, height: 18, viewBox: '-9 -9 18 18', 'aria-hidden': 'true' }, flexPage.dot(kind));
  const ring = () => flexPage.svg('svg', { width: 18, height: 18, viewBox: '-9 -9 18 18', 'aria-hidden': 'true' }, flexPage.svg('circle', { class: 'differs', r: 7 }));
  flexPage.legend = () => el('ul', { class: 'legend', 'aria-label': 'Legend' },
    DOTS.map(([kind, words]) => el('li', { title: words }, mark(kind), STATES[kind])),
    page.divergence && el('li', { title: 'A and B diverge here' }, ring(), 'diverges'));
  help.append(
    el('h2', { text: 'What this shows' }),
    el('p', { text: 'The model with every hook point; the ranks, and which part of the chosen site each of them holds; and what dumps or statistics recorded. Choose a site, a rank or a layer anywhere, and all panes follow.' }),
    el('ul', { class: 'dots' }, DOTS.map(([kind, words]) => el('li', null, mark(kind), el('b', { text: STATES[kind] }), words))),
    el('dl', { class: 'keys' }, KEYS.map(([key, words]) => el('div', null, el('dt', null, el('kbd', { text: key })), el('dd', { text: words })))),
    el('p', { class: 'quiet', text: 'This file holds everything it shows. It loads nothing and sends nothing.' }),
    el('button', { text: 'Close', onclick: () => help.close() }),
  );

  function step(by) { // through sites in model order, of those that the filter leaves
    const { marks } = matching();
    const end = by > 0 ? marks.length : -1;
    for (let i = state.site === null ? (by > 0 ? 0 : marks.length - 1) : state.site + by; i !== end; i += by) {
      if (marks[i]) { select({ site: i }); return; }
    }
  }
  const DO = {
    '/': () => { input.focus(); input.select(); },
    '?': showHelp,
    t: flexTheme.next,
    Escape: () => select({ site: null, rank: null, part: null }),
    '[': () => flexPage.stepLayer(-1),
    ']': () => flexPage.stepLayer(1),
    '{': () => step(-1),
    '}': () => step(1),
  };
  flexPage.stepLayer = () => {};
  document.addEventListener('keydown', (event) => {
    const typing = /^(input|select|textarea)$/i.test(event.target.tagName);
    if (typing || event.ctrlKey || event.metaKey || event.altKey || help.open) return;
    if (Object.hasOwn(DO, event.key)) { event.preventDefault(); DO[event.key](); }
  });

  on((_, changed) => {
    if (['filter', 'group', 'stage', 'kind'].some((n) => changed.has(n))) list(changed.has('filter') && document.activeElement === input);
    for (const name of ['stage', 'kind', 'group']) if (byId(name)) byId(name).value = state[name] ?? '';
    if (input.value !== state.filter) input.value = state.filter;
  });
})();
