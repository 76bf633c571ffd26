// Search runs in a Worker, which browsers refuse to pages that are opened from the disk (file://). There a hidden frame
// takes its place.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.room = frame.contentWindow;
      this.room.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = this.room.document.createElement("script");
      script.src = url;
      this.loaded = new Promise((resolve) => script.addEventListener("load", resolve));
      this.room.document.body.append(script);
    }

    async postMessage(data) {
      await this.loaded;
      this.room.dispatchEvent(new MessageEvent("message", { data }));
    }

    terminate() {
      this.room.frameElement.remove();
    }
  };
}
