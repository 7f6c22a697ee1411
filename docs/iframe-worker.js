/* Search of pages that were opened from a folder. Browsers start no Worker there, so its script runs in a hidden frame.
   The search's own script asks for the name IFrameWorker, and for a script element with its address. */
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      (document.body || document.documentElement).append(frame);
      const inside = frame.contentWindow;
      const load = (source) => new Promise((done, failed) => {
        const script = inside.document.createElement("script");
        script.src = source;
        script.onload = done;
        script.onerror = failed;
        inside.document.documentElement.append(script);
      });
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", {data}));
      inside.importScripts = (...sources) =>
        sources.reduce((before, source) => before.then(() => load(new URL(source, address))), Promise.resolve());
      this.frame = frame;
      this.send = (data) => inside.dispatchEvent(new MessageEvent("message", {data}));
      this.ready = load(address);
    }
    postMessage(data) {
      this.ready.then(() => this.send(data));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
