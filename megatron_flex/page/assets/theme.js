'use strict';
// Light and dark: a button, and the key t where a page binds it; the choice is kept for all pages.

const flexTheme = (() => {
  const root = document.documentElement, button = document.createElement('button'), listeners = [];
  const THEMES = { auto: ['◐', 'as the system'], light: ['○', 'light'], dark: ['●', 'dark'] };
  const remembered = () => { try { return localStorage.getItem('flex-theme'); } catch { return null; } };
  const tell = () => listeners.forEach((listener) => listener());
  function dress(theme) {
    const name = theme in THEMES ? theme : 'auto', [sign, words] = THEMES[name];
    root.dataset.theme = name;
    button.textContent = sign;
    button.setAttribute('aria-label', `Colours: ${words}; change`);
    button.title = `Colours: ${words} (t)`;
    try { localStorage.setItem('flex-theme', name); } catch { /* a page from a file may keep nothing */ }
    tell();
  }
  function next() {
    const all = Object.keys(THEMES);
    dress(all[(all.indexOf(root.dataset.theme) + 1) % all.length]);
  }
  Object.assign(button, { id: 'theme', className: 'plain', type: 'button' });
  button.addEventListener('click', next);
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', tell);
  dress(remembered() || 'auto');
  document.getElementById('tools').append(button);
  return { next, onChange: (listener) => listeners.push(listener) }; // for what is drawn on a canvas
})();
