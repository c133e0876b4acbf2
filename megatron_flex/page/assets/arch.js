'use strict';

flexPage.pane('architecture', { title: 'Architecture', make() { return { update() {} }; } });
