// Perfetto's trace processor, as its web page runs it: requests from stdin, replies to stdout.
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const bundle = process.argv[2];
process.type = "renderer"; // no Node.js, of which the bundle knows nothing
globalThis.self = globalThis;
globalThis.WorkerGlobalScope = function () {};
globalThis.importScripts = () => {};
globalThis.location = { href: "/" };
globalThis.XMLHttpRequest = class {
  open(method, url) {
    this.file = path.join(path.dirname(bundle), path.basename(url));
  }
  send() {
    this.status = 200;
    this.response = fs.readFileSync(this.file);
  }
};
const replies = [];
const port = { postMessage: (reply) => replies.push(Buffer.from(reply)) };
vm.runInThisContext(fs.readFileSync(bundle, "utf8"));
self.onmessage({ data: port });
setImmediate(() => {
  port.onmessage({ data: new Uint8Array(fs.readFileSync(0)) });
  fs.writeFileSync(1, Buffer.concat(replies));
});
