'use strict';
// Parts that open when a link leads into them. The rest of the page is plain HTML.

(() => {
  document.addEventListener('keydown', (event) => {
    if (event.key === 't' && !event.ctrlKey && !event.metaKey && !event.altKey) flexTheme.next();
  });

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
