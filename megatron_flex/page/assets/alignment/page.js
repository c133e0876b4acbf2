'use strict';
// Light and dark, and parts that open when a link leads into them. The rest of the page is plain HTML.

(() => {
  const root = document.documentElement, button = document.getElementById('theme');
  const THEMES = { auto: ['◐', 'as the system'], light: ['○', 'light'], dark: ['●', 'dark'] };
  const kept = () => { try { return localStorage.getItem('flex-theme'); } catch { return null; } };
  function dress(theme) {
    const name = theme in THEMES ? theme : 'auto', [sign, words] = THEMES[name];
    root.dataset.theme = name;
    button.textContent = sign;
    button.setAttribute('aria-label', `Colours: ${words}; change`);
    button.title = `Colours: ${words} (t)`;
    try { localStorage.setItem('flex-theme', name); } catch { /* a page from a file may keep nothing */ }
  }
  function next() {
    const all = Object.keys(THEMES);
    dress(all[(all.indexOf(root.dataset.theme) + 1) % all.length]);
  }
  button.addEventListener('click', next);
  document.addEventListener('keydown', (event) => {
    if (event.key === 't' && !event.ctrlKey && !event.metaKey && !event.altKey) next();
  });
  dress(kept() || 'auto');

  function open(id) {
    const target = document.getElementById(id), part = target && target.closest('details');
    if (!part) return;
    part.open = true;
    target.scrollIntoView({ block: 'center' });
  }
  for (const link of document.querySelectorAll('a[href^="#"]')) {
    link.addEventListener('click', (event) => {
      event.preventDefault();
      open(decodeURIComponent(link.hash.slice(1)));
    });
  }
  if (location.hash) open(decodeURIComponent(location.hash.slice(1)));
})();
