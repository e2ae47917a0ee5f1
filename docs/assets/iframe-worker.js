// Browsers start no Worker from a file: URL, and the search runs in one. On pages opened from a folder a
// hidden frame takes its place: it runs the same script, and messages go to and fro as events.
if (location.protocol === "file:") {
  const load = (frame, url) =>
    new Promise((resolve, reject) => {
      const script = frame.contentDocument.createElement("script");
      script.src = url;
      script.onload = resolve;
      script.onerror = () => reject(new Error(`cannot load ${url}`));
      frame.contentDocument.body.append(script);
    });

  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const scope = this.frame.contentWindow;
      scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      scope.importScripts = (...urls) =>
        urls.reduce((before, each) => before.then(() => load(this.frame, each)), Promise.resolve());
      this.loaded = load(this.frame, url);
    }

    postMessage(data) {
      const scope = this.frame.contentWindow;
      this.loaded.then(() => scope.dispatchEvent(new scope.MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
