'use strict';
// Everything is there: draw.

flexPage.start();
