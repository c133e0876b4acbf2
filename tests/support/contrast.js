// Every text that can be seen, with the contrast of its colour to what is painted behind it (WCAG 2, 1.4.3).
(least) => {
  "use strict";
  const still = document.createElement("style");
  still.textContent = "* { pointer-events: auto !important; transition: none !important; scroll-behavior: auto !important }";
  document.head.append(still);
  const pen = Object.assign(document.createElement("canvas"), {width: 1, height: 1})
    .getContext("2d", {willReadFrequently: true});
  const known = new Map();
  const rgba = (colour) => { // of any CSS colour, by painting it
    if (!known.has(colour)) {
      pen.clearRect(0, 0, 1, 1);
      pen.fillStyle = colour;
      pen.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = pen.getImageData(0, 0, 1, 1).data;
      known.set(colour, [r, g, b, a / 255]);
    }
    return [...known.get(colour)];
  };
  const over = (top, under) => [0, 1, 2].map((i) => top[i] * top[3] + under[i] * (1 - top[3])).concat(1);
  const light = (colour) => [0.2126, 0.7152, 0.0722].reduce((sum, weight, i) => {
    const c = colour[i] / 255;
    return sum + weight * (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  }, 0);
  const contrast = (one, two) => {
    const [low, high] = [light(one), light(two)].sort((x, y) => x - y);
    return (high + 0.05) / (low + 0.05);
  };
  const opacity = (node) => {
    let product = 1;
    for (let at = node; at instanceof Element; at = at.parentElement) product *= Number(getComputedStyle(at).opacity);
    return product;
  };
  const paint = (node) => {
    const style = getComputedStyle(node);
    let colour;
    if (node instanceof SVGElement && !(node instanceof SVGSVGElement)) {
      if (!(node instanceof SVGGeometryElement) || style.fill === "none" || style.fill.startsWith("url")) return null;
      colour = rgba(style.fill);
      colour[3] *= Number(style.fillOpacity);
    } else colour = rgba(style.backgroundColor);
    colour[3] *= opacity(node);
    return colour[3] > 0 ? colour : null;
  };
  const root = document.createElement("i");
  root.style.color = "Canvas";
  document.body.append(root);
  const canvas = rgba(getComputedStyle(root).color);
  root.remove();
  const behind = (stack) => {
    const layers = [];
    for (const node of stack) {
      const colour = paint(node);
      if (colour) layers.push(colour);
      if (colour && colour[3] > 0.999) break;
    }
    return layers.reduceRight((under, top) => over(top, under), canvas);
  };
  const middle = (box) => [box.left + box.width / 2, box.top + box.height / 2];
  const look = (owner, box, colour, text) => {
    let rect = box();
    if (rect.width < 2 || rect.height < 2) return;
    let [x, y] = middle(rect);
    let stack = document.elementsFromPoint(x, y);
    if (!stack.includes(owner)) {
      owner.scrollIntoView({block: "center", inline: "center"});
      [x, y] = middle(box());
      stack = document.elementsFromPoint(x, y);
    }
    if (!stack.includes(owner)) return; // something lies over it
    seen += 1;
    const ground = behind(stack.slice(stack.indexOf(owner)));
    const ink = [...colour];
    ink[3] *= opacity(owner);
    const ratio = contrast(over(ink, ground), ground);
    if (ratio < least) {
      const hex = (c) => "#" + c.slice(0, 3).map((n) => Math.round(n).toString(16).padStart(2, "0")).join("");
      const what = owner.tagName.toLowerCase() + (owner.getAttribute("class") ? `.${owner.getAttribute("class")}` : "");
      faint.push(`${ratio.toFixed(2)}: ${JSON.stringify(text.trim().slice(0, 40))} ${hex(over(ink, ground))} ` +
        `on ${hex(ground)} (${what})`);
    }
  };
  let seen = 0;
  const faint = [];
  const shown = (owner) => owner.checkVisibility({opacityProperty: true, visibilityProperty: true}) &&
    !owner.closest("[disabled], [aria-disabled=true]") && Math.min(...(({width, height}) => [width, height])(
    owner.getBoundingClientRect())) >= 2;
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const node = texts.currentNode, owner = node.parentElement;
    if (!node.data.trim() || owner.closest("script, style, title, desc, option") || !shown(owner)) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const style = getComputedStyle(owner);
    const inside = owner instanceof SVGElement;
    const colour = rgba(inside ? style.fill : style.color);
    if (inside) colour[3] *= Number(style.fillOpacity);
    look(owner, () => range.getClientRects()[0] || range.getBoundingClientRect(), colour, node.data);
  }
  for (const owner of document.querySelectorAll("input, select, textarea")) {
    if (!shown(owner) || ["checkbox", "radio", "range"].includes(owner.type)) continue;
    const empty = !owner.value && owner.placeholder;
    const style = getComputedStyle(owner, empty ? "::placeholder" : null);
    const colour = rgba(style.color);
    if (empty) colour[3] *= Number(style.opacity);
    look(owner, () => owner.getBoundingClientRect(), colour, owner.value || owner.placeholder || owner.type);
  }
  still.remove();
  scrollTo(0, 0);
  return {seen, faint};
}
