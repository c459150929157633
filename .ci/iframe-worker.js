// Pages that are opened from a folder (file://) may start no Worker. Its code then runs in a hidden frame of the page:
// the search of the theme asks for nothing but messages in both directions.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(source) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inner = frame.contentWindow;
      this.inner.postMessage = (data) => setTimeout(() => this.dispatchEvent(new MessageEvent("message", { data })));
      const script = this.inner.document.createElement("script");
      this.ready = new Promise((resolve) => script.addEventListener("load", resolve));
      script.src = source;
      this.inner.document.body.append(script);
    }
    postMessage(data) {
      void this.ready.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {}
  };
}
