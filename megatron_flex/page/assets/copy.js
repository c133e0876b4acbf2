'use strict';
// Copying: a site's name, and the code of a hook there.

const flexCopy = (() => {
  const { page, el } = flexPage;
  const SHOWN = 1600; // milliseconds that a button tells what it did

  function byHand(text) { // where the clipboard is not open to a page, as in older browsers for files
    const field = el('textarea', { 'aria-hidden': 'true', class: 'copying' });
    field.value = text;
    document.body.append(field);
    field.select();
    const done = document.execCommand('copy');
    field.remove();
    return done;
  }
  async function copy(text) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch { return byHand(text); }
  }
  function button(label, words, text) {
    return el('button', {
      class: 'copy', 'aria-label': words, title: `${words}: ${text}`,
      onclick: async ({ currentTarget: it }) => {
        it.textContent = await copy(text) ? 'copied' : 'not copied';
        it.focus(); // the field of `byHand` had it
        setTimeout(() => { it.textContent = label; }, SHOWN);
      }, text: label,
    });
  }
  const hook = (name) => `mf.HookFunction(${JSON.stringify(name)})`;

  function buttons(site) { // of a hidden site there is no hook
    const name = page.sites.name[site];
    return el('span', { class: 'copies' }, button('copy name', 'Copy the name of the site', name),
      page.sites.reason[site] >= 0 && page.sites.state[site] === 3 ? null : button('copy hook', 'Copy the code of a hook', hook(name)));
  }
  return { buttons };
})();
