"""A page in a real browser asks the server with `fetch`: where its origin is allowed, and where it is not."""

import json
import queue
import shutil
import subprocess
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from http_server import serving

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium")

KEY = "a key"
BEGIN = """
const body = {model: "tiny", messages: [{role: "user", content: "w6 w7"}], temperature: 0, max_tokens: 12};
const ask = (more, options) => fetch(server + "/v1/chat/completions", {
  method: "POST",
  headers: {"Content-Type": "application/json", "Authorization": "Bearer " + key},
  body: JSON.stringify({...body, ...more}),
  ...options,
});
"""
ALLOWED = """
const whole = await (await ask({})).json();
said.text = whole.choices[0].message.content;
const streamed = await ask({stream: true});
said.events = "";
for await (const part of streamed.body.pipeThrough(new TextDecoderStream())) said.events += part;
const bad = await ask({temperature: -1});
said.bad = [bad.status, (await bad.json()).error.param];
const keyless = await ask({}, {headers: {"Content-Type": "application/json"}});
said.keyless = keyless.status;
const stop = new AbortController();
const long = await ask({stream: true, max_tokens: 100, ignore_eos: true}, {signal: stop.signal});
const reader = long.body.getReader();
await reader.read();
stop.abort();
said.aborted = await reader.closed.then(() => null, error => error.name);
"""
FOREIGN = """
const outcome = asked => asked.then(answer => answer.type, error => error.name);
said.json = await outcome(ask({}));
said.text = await outcome(ask({}, {mode: "no-cors", headers: {"Content-Type": "text/plain"}}));
said.key = await outcome(ask({}, {mode: "no-cors"}));
said.models = await outcome(fetch(server + "/v1/models"));
said.form = await new Promise(resolve => {
  const frame = Object.assign(document.createElement("iframe"), {name: "frame"});
  const form = Object.assign(document.createElement("form"), {
    method: "POST", action: server + "/v1/chat/completions", enctype: "text/plain", target: "frame",
  });
  form.append(Object.assign(document.createElement("input"), {name: JSON.stringify(body)}));
  document.body.append(frame, form);
  frame.onload = () => resolve("sent");
  form.submit();
});
"""


class Page(BaseHTTPRequestHandler):
    """Serves one page, which sends back what it has seen."""

    def do_GET(self):
        self._answer(self.server.page.encode())

    def do_POST(self):
        self.server.said.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self._answer(b"")

    def _answer(self, body):
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@contextmanager
def pages():
    """A server of pages, and its origin."""
    made = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    made.said = queue.Queue()
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    try:
        yield made, f"http://127.0.0.1:{made.server_port}"
    finally:
        made.shutdown()
        thread.join()
        made.server_close()


def seen_by_a_page(server, script, made, origin, tmp_path):
    """What a page with this script has seen of the server."""
    made.page = (
        f"<!doctype html><body><script type=module>const said = {{}};"
        f"const [server, key] = {json.dumps([server.url, KEY])};"
        f"try {{ {BEGIN} {script} }} catch (error) {{ said.error = String(error); }}"
        "await fetch('/', {method: 'POST', body: JSON.stringify(said)});</script>"
    )
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-proxy-server"]
    with (tmp_path / "stderr").open("wb") as stderr:
        command = [BROWSER, *options, f"--user-data-dir={tmp_path / 'profile'}", origin]
        process = subprocess.Popen(command, stdout=stderr, stderr=stderr)
        try:
            return made.said.get(timeout=120)
        finally:
            process.terminate()
            process.wait(30)


@pytest.fixture
def asked(tiny_engine, monkeypatch):
    """The requests that reach the engine."""
    found, add = [], tiny_engine.core.add
    monkeypatch.setattr(tiny_engine.core, "add", lambda requests: found.extend(requests) or add(requests))
    return found


def test_a_page_whose_origin_is_allowed_asks_streams_and_goes_away(tiny_engine, asked, slow, tmp_path):
    with pages() as (made, origin), serving(tiny_engine, cors_origins=[origin], api_key=KEY) as server:
        said = seen_by_a_page(server, ALLOWED, made, origin, tmp_path)
    assert "error" not in said, said
    expected = tiny_engine.generate([{"role": "user", "content": "w6 w7"}], max_new_tokens=12).text
    events = [line.removeprefix("data: ") for line in said["events"].splitlines() if line]
    assert events.pop() == "[DONE]"
    pieces = [json.loads(event)["choices"][0]["delta"].get("content", "") for event in events]
    assert said["text"] == "".join(pieces) == expected
    assert (said["bad"], said["keyless"], said["aborted"]) == ([400, "temperature"], 401, "AbortError")
    whole, streamed, long, *_ = asked
    assert [whole.finish_reason, streamed.finish_reason] == 2 * ["length"]
    assert long.finish_reason == "aborted"


def test_a_foreign_page_learns_nothing_and_costs_nothing(tiny_engine, asked, tmp_path):
    """Neither a request that the browser asks about first nor one that it just sends."""
    with pages() as (made, origin), serving(tiny_engine) as server:
        said = seen_by_a_page(server, FOREIGN, made, origin, tmp_path)
    assert said == {
        "json": "TypeError",
        "text": "opaque",
        "key": "opaque",  # the browser leaves the key and the type of the body out
        "models": "TypeError",
        "form": "sent",
    }
    assert asked == []
