'use strict';
/* What the views of the data pane draw with: packed numbers, colours, heat maps, lines, choices. */
(() => {
  const { el, svg } = flexPage;

  // -- packed numbers --------------------------------------------------------------------------------

  const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));

  const NAN = 255, POSITIVE = 254, NEGATIVE = 253, STEPS = 252;

  /** The values of a packed picture: finite ones within half a step, NaN and infinities as they are. */
  function unpack(packed) {
    if (packed.values) return packed.values;
    const raw = bytes(packed.q), step = (packed.hi - packed.lo) / STEPS;
    packed.values = Float32Array.from(raw, (n) => {
      if (n === NAN) return NaN;
      if (n === POSITIVE) return Infinity;
      return n === NEGATIVE ? -Infinity : packed.lo + n * step;
    });
    return packed.values;
  }

  /** A number for people: 4 digits, NaN and infinities in words; a dash where there is none. */
  function number(value) {
    if (value === null || value === undefined) return '–';
    if (Number.isNaN(value)) return 'NaN';
    if (!Number.isFinite(value)) return value > 0 ? '+inf' : '-inf';
    if (value === 0) return '0';
    const size = Math.abs(value);
    return size >= 1e5 || size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
  }

  // -- colours ---------------------------------------------------------------------------------------

  const RAMPS = {
    size: ['#440154', '#472d7b', '#3b528b', '#2c728e', '#21918c', '#28ae80', '#5ec962', '#addc30', '#fde725'],
    light: ['#f4f8fd', '#d3e4f3', '#a4cce3', '#6aaed6', '#3787c0', '#105ba4', '#08306b'],
    dark: ['#131a26', '#15345a', '#1a5592', '#2b7cc4', '#5aa7e4', '#a3d2f5', '#f2f9ff'],
    signedLight: ['#0b4a8f', '#4a93c9', '#b5d6ea', '#f7f7f7', '#f9c3a6', '#d9604c', '#8a0f26'],
    signedDark: ['#9fd4ff', '#3f8fd0', '#1d4668', '#15181d', '#6b2f26', '#d1604c', '#ffc2ae'],
  };
  const ODD = '#ff00c8'; // NaN and infinities
  const rgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));

  /** Whether the page is dark now, by the colour that it really has. */
  function isDark() {
    const found = getComputedStyle(document.body).backgroundColor.match(/[\d.]+/g) || [255, 255, 255];
    if (found.length > 3 && Number(found[3]) === 0) return matchMedia('(prefers-color-scheme: dark)').matches;
    return Number(found[0]) + Number(found[1]) + Number(found[2]) < 384;
  }

  /** 256 colours of a kind: `size` of magnitudes, `share` of shares from 0 to 1, `signed`. */
  function ramp(kind) {
    const shade = isDark();
    const name = kind === 'share' ? (shade ? 'dark' : 'light')
      : kind === 'signed' ? (shade ? 'signedDark' : 'signedLight') : 'size';
    const stops = RAMPS[name].map(rgb);
    return Array.from({ length: 256 }, (_, i) => {
      const at = (i / 255) * (stops.length - 1), left = Math.min(Math.floor(at), stops.length - 2);
      return stops[left].map((v, c) => Math.round(v + (stops[left + 1][c] - v) * (at - left)));
    });
  }

  const css = (colour) => `rgb(${colour.join(' ')})`;

  /** Which of the 256 colours a value has between two ends. */
  const shade = (value, lo, hi) =>
    Math.max(0, Math.min(255, Math.round(hi > lo ? (255 * (value - lo)) / (hi - lo) : 127)));

  // -- heat maps -------------------------------------------------------------------------------------

  /** The ends of the colours, and their kind: of values of both signs zero is in the middle. */
  function ends(values, kind) {
    let lo = Infinity, hi = -Infinity;
    for (const v of values) if (Number.isFinite(v)) { lo = Math.min(lo, v); hi = Math.max(hi, v); }
    if (lo > hi) [lo, hi] = [0, 1];
    if (kind) return { lo: kind === 'share' ? 0 : lo, hi, kind };
    if (lo >= 0) return { lo: 0, hi, kind: 'size' };
    const most = Math.max(-lo, hi);
    return { lo: -most, hi: most, kind: 'signed' };
  }

  /** Paint `values[row * columns + column]` to a canvas, an entry a pixel; what is not there stays clear. */
  function paint(canvas, values, rows, columns, scale, missing) {
    canvas.width = columns;
    canvas.height = rows;
    const context = canvas.getContext('2d'), image = context.createImageData(columns, rows);
    const colours = ramp(scale.kind), odd = rgb(ODD);
    for (let i = 0; i < rows * columns; i += 1) {
      if (missing && missing(i)) continue;
      const value = values[i];
      const colour = Number.isFinite(value) ? colours[shade(value, scale.lo, scale.hi)] : odd;
      image.data.set([colour[0], colour[1], colour[2], 255], 4 * i);
    }
    context.putImageData(image, 0, 0);
  }

  /** A bar of the colours with its ends. */
  function legend(scale, odd) {
    const colours = ramp(scale.kind), stops = [0, 51, 102, 153, 204, 255].map((i) => css(colours[i]));
    const bar = el('span', { class: 'data-bar', 'aria-hidden': 'true' });
    bar.style.background = `linear-gradient(to right, ${stops.join(', ')})`;
    const out = el('span', { class: 'data-legend' }, number(scale.lo), bar, `${scale.open ? '≥ ' : ''}${number(scale.hi)}`);
    if (odd) {
      const mark = el('span', { class: 'data-odd', 'aria-hidden': 'true' });
      mark.style.background = ODD;
      out.append(mark, 'NaN or infinite');
    }
    return out;
  }

  /**
   * A heat map that tells the value under the pointer, and under a cursor that the arrow keys move.
   *
   * about: { values, rows, columns, scale, label, tell(row, column), choose(row, column), at: [row, column],
   *          missing(index), height, key, axes: [rows, columns] }
   */
  function heat(about) {
    const { rows, columns, values } = about, scale = about.scale || ends(values);
    const canvas = el('canvas', { class: 'data-canvas' });
    canvas.dataset.rows = rows;
    canvas.dataset.columns = columns;
    paint(canvas, values, rows, columns, scale, about.missing);
    const cursor = el('span', { class: 'data-cursor', 'aria-hidden': 'true' });
    const grid = el('div', { class: 'data-heat', tabindex: '0', role: 'img', 'aria-label':
      `${about.label}. Arrow keys move over the entries${about.choose ? ', Enter chooses' : ''}.` }, canvas, cursor);
    if (about.key) grid.dataset.key = about.key;
    if (about.width) grid.style.maxWidth = `${about.width}px`;
    grid.style.height = `${about.height || Math.max(90, Math.min(300, rows * 6))}px`;
    const said = el('output', { class: 'data-said', 'aria-live': 'polite' });
    const rest = `Point at an entry, or use the arrow keys${about.choose ? '; click or Enter chooses' : ''}.`;
    let at = about.at || [0, 0];
    const place = (row, column, moved) => {
      at = [Math.max(0, Math.min(rows - 1, row)), Math.max(0, Math.min(columns - 1, column))];
      cursor.style.cssText = `top:${(100 * at[0]) / rows}%;left:${(100 * at[1]) / columns}%;` +
        `height:max(3px, ${100 / rows}%);width:max(3px, ${100 / columns}%);`;
      cursor.hidden = !moved && !about.at;
      said.textContent = moved ? about.tell(...at) : rest;
    };
    const under = (event) => {
      const box = canvas.getBoundingClientRect();
      return [Math.floor(((event.clientY - box.top) / box.height) * rows),
        Math.floor(((event.clientX - box.left) / box.width) * columns)];
    };
    grid.addEventListener('pointermove', (event) => place(...under(event), true));
    grid.addEventListener('focus', () => place(...at, true));
    grid.addEventListener('click', (event) => {
      place(...under(event), true);
      if (about.choose) about.choose(...at);
    });
    grid.addEventListener('keydown', (event) => {
      const step = event.shiftKey ? 8 : 1;
      const moves = { ArrowUp: [-step, 0], ArrowDown: [step, 0], ArrowLeft: [0, -step], ArrowRight: [0, step],
        Home: [0, -columns], End: [0, columns], PageUp: [-rows, 0], PageDown: [rows, 0] };
      if (moves[event.key]) place(at[0] + moves[event.key][0], at[1] + moves[event.key][1], true);
      else if ((event.key === 'Enter' || event.key === ' ') && about.choose) about.choose(...at);
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    place(...at, false);
    const [down, across] = about.axes || ['', ''];
    const odd = values.some((v, i) => !Number.isFinite(v) && !(about.missing && about.missing(i)));
    return el('div', { class: 'data-picture' },
      el('div', { class: 'data-axes' }, el('span', {}, `${down} ↓  ${across} →`), legend(scale, odd)),
      grid, said);
  }

  /** The entries that a drawn row or column stands for: `12`, or `12–15`. */
  function span(labels, i, block) {
    const from = Array.isArray(labels) ? labels[i] : labels.first + i * labels.step;
    return block > 1 ? `${from}–${from + block - 1}` : String(from);
  }

  // -- lines -----------------------------------------------------------------------------------------

  let space = 520;
  /** Note how wide the pane is inside, and whether two sources share it. */
  function measure(pane, both) {
    const inside = pane - 34;
    space = both && inside > 560 ? (inside - 18) / 2 : inside;
  }
  /** The width of a chart in pixels. */
  const room = () => Math.max(240, Math.min(1100, Math.floor(space)));

  /** Ends of an axis at round numbers, and the ticks between. */
  function ticks(lo, hi, count) {
    if (!(hi > lo)) { const pad = Math.abs(lo) / 10 || 1; lo -= pad; hi += pad; }
    const rough = (hi - lo) / count, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map((s) => s * power).find((s) => s >= rough * 0.999);
    const first = Math.floor(lo / step + 1e-9), last = Math.ceil(hi / step - 1e-9);
    const out = Array.from({ length: last - first + 1 }, (_, i) => Number(((first + i) * step).toPrecision(10)));
    return { lo: out[0], hi: out[out.length - 1], ticks: out };
  }

  /**
   * Lines over whole numbers: `lines: [{ values, chosen, label, colour }]`; a gap where a value is
   * not finite. `log` spans orders of magnitude.
   *
   * about: { lines, names(i), label, across, log, at, choose(i), height, key }
   */
  function chart(about) {
    const width = room(), height = about.height || 190, left = 64, right = 14, top = 8, low = 34;
    const many = Math.max(...about.lines.map((l) => l.values.length));
    const fit = (v) => Number.isFinite(v) && (!about.log || v > 0);
    const good = about.lines.flatMap((l) => Array.from(l.values).filter(fit));
    const map = about.log ? Math.log10 : (v) => v;
    const axis = ticks(good.length ? map(least(good)) : 0, good.length ? map(most(good)) : 1, 4);
    const x = (i) => left + ((width - left - right) * (many > 1 ? i / (many - 1) : 0.5));
    const y = (v) => top + (height - top - low) * (1 - (map(v) - axis.lo) / (axis.hi - axis.lo));
    const root = svg('svg', { width, height, class: 'data-chart', role: 'img', 'aria-label': about.label });
    for (const tick of axis.ticks) {
      const value = about.log ? 10 ** tick : tick, at = y(value);
      root.append(svg('line', { x1: left, x2: width - right, y1: at, y2: at, class: 'data-grid' }),
        svg('text', { x: left - 6, y: at + 4, 'text-anchor': 'end' }, about.log ? number(value) : told(value, axis)));
    }
    const each = Math.max(1, Math.ceil(many / Math.max(4, Math.floor((width - left) / 56))));
    for (let i = 0; i < many; i += each) {
      root.append(svg('text', { x: x(i), y: height - 18, 'text-anchor': 'middle' }, about.names(i)));
    }
    if (about.across) {
      root.append(svg('text', { x: (left + width) / 2, y: height - 3, 'text-anchor': 'middle', class: 'data-dim' },
        about.across));
    }
    if (about.at !== undefined && about.at !== null && about.at >= 0) {
      root.append(svg('line', { x1: x(about.at), x2: x(about.at), y1: top, y2: height - low, class: 'data-now' }));
    }
    for (const line of about.lines) {
      let path = '', pen = 'M';
      Array.from(line.values).forEach((v, i) => {
        if (fit(v)) { path += `${pen}${x(i).toFixed(1)} ${y(v).toFixed(1)}`; pen = 'L'; } else pen = 'M';
      });
      const drawn = svg('path', { d: path || 'M0 0', class: line.chosen ? 'data-line data-on' : 'data-line' },
        svg('title', {}, line.label || ''));
      if (line.colour) drawn.style.stroke = line.colour;
      root.append(drawn);
      if (line.chosen || many === 1) {
        Array.from(line.values).forEach((v, i) => {
          if (!fit(v)) return;
          const dot = svg('circle', { cx: x(i), cy: y(v), r: i === about.at ? 4.5 : 2.6, class: 'data-dot' },
            svg('title', {}, `${about.names(i)}: ${number(v)}`));
          if (line.colour) dot.style.fill = line.colour;
          if (about.choose) { dot.style.cursor = 'pointer'; dot.addEventListener('click', () => about.choose(i)); }
          root.append(dot);
        });
      }
    }
    return root;
  }

  /** A tick in as many digits as its neighbours need to differ. */
  function told(value, axis) {
    const step = (axis.hi - axis.lo) / Math.max(1, axis.ticks.length - 1), size = Math.max(Math.abs(axis.lo), Math.abs(axis.hi));
    const digits = Math.min(12, Math.max(1, Math.ceil(Math.log10(size / step) - 1e-9) + 2));
    const small = size < 1e-3 || size >= 1e6;
    return Math.abs(value) < step / 1e6 ? '0' : small ? value.toExponential(Math.min(6, digits - 1)).replace(/\.?0+e/, 'e')
      : String(Number(value.toPrecision(digits)));
  }

  const least = (values) => values.reduce((a, b) => Math.min(a, b), Infinity);
  const most = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);
  const sum = (values) => values.reduce((a, b) => a + b, 0);

  // -- choices ---------------------------------------------------------------------------------------

  /** Call `go` with 1 or -1 for an arrow key in a group. */
  function arrows(group, go) {
    group.addEventListener('keydown', (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      event.stopPropagation();
      go(step);
    });
  }

  /** One of several, as a group of buttons; the arrow keys go from one to the next. */
  function choice(label, options, chosen, pick, key) {
    const group = el('div', { class: 'data-choice', role: 'radiogroup', 'aria-label': label });
    const buttons = options.map((option, i) => {
      const on = option.value === chosen;
      const button = el('button', { type: 'button', role: 'radio', 'aria-checked': String(on),
        tabindex: on || (i === 0 && !options.some((o) => o.value === chosen)) ? '0' : '-1' }, option.text);
      if (key) button.dataset.key = `${key} ${option.value}`;
      button.addEventListener('click', () => pick(option.value));
      return button;
    });
    arrows(group, (step) => {
      const next = (buttons.indexOf(document.activeElement) + step + buttons.length) % buttons.length;
      buttons[next].focus();
      pick(options[next].value);
    });
    group.append(...buttons);
    return group;
  }

  /** One of many, as a list that opens. */
  function menu(label, options, chosen, pick, key) {
    const list = el('select', { 'aria-label': label });
    if (key) list.dataset.key = key;
    for (const option of options) {
      const item = el('option', { value: String(option.value) }, option.text);
      item.selected = option.value === chosen;
      list.append(item);
    }
    list.addEventListener('change', () => pick(options[list.selectedIndex].value));
    return el('label', { class: 'data-menu' }, `${label} `, list);
  }

  const sentence = (text) => el('p', { class: 'data-lacks' }, text);
  const head = (text, ...more) => el('h4', { class: 'data-head' }, text, ...more);

  flexPage.dataTools = { arrows, choice, menu, sentence, head, isDark,
    unpack, number, ramp, css, shade, ends, paint, legend, heat, span, chart, room, measure,
    least, most, sum };
})();
