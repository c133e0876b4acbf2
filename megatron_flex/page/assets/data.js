'use strict';
// The data pane.

flexPage.pane('data', {
  title: 'Data',
  make(root) {
    root.append(flexPage.el('p', { class: 'quiet', text: 'Nothing was given to show here.' }));
    return { update() {} };
  },
});
