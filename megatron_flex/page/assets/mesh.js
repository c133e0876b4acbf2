'use strict';

flexPage.pane('mesh', { title: 'Mesh', make() { return { update() {} }; } });
