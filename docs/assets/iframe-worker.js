// The theme's search runs in a Worker, which browsers refuse to pages that are opened from files. There, a hidden
// frame of the same page does a Worker's work.
"use strict";

if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.inside.importScripts = (...urls) =>
        urls.reduce((before, next) => before.then(() => this.load(next)), Promise.resolve());
      this.ready = this.load(url);
    }

    load(url) {
      return new Promise((resolve, reject) => {
        const script = this.inside.document.createElement("script");
        script.src = new URL(url, location.href).href;
        script.onload = resolve;
        script.onerror = () => reject(new Error(`cannot load ${url}`));
        this.inside.document.body.append(script);
      });
    }

    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.inside.frameElement.remove();
    }
  };
}
