"""A stand-in for vLLM's OpenAI server: it keeps what it is asked and answers as vLLM 0.32 does."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MODEL = "served"
FIGURES = {"reused_tokens": 70, "recomputed_tokens": 5}
USAGE = {"prompt_tokens": 100, "completion_tokens": 2, "total_tokens": 102}
PIECES = ["two ", "years"]
TEXT = "".join(PIECES)


class FakeVLLM:
    """Where it listens, what it was asked, and how it behaves."""

    def __init__(self):
        self.bodies = []
        self.keys = []
        self.delay_s = 0.0
        self.blends = True
        self.endless = False
        self.left = threading.Event()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"fake": self}))
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}/v1"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    @property
    def body(self):
        return self.bodies[-1]

    def close(self):
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.fake.bodies.append(body)
        self.fake.keys.append(self.headers["Authorization"])
        time.sleep(self.fake.delay_s)
        try:
            self._answer(body)
        except OSError:  # nobody listens any more
            self.close_connection = True
            self.fake.left.set()

    def _answer(self, body):
        if body["model"] != MODEL:
            self._send(404, {"error": {"message": f"The model `{body['model']}` does not exist.", "code": 404}})
        elif body.get("stream"):
            self._stream(body)
        else:
            blended = {"rag_blend": FIGURES} if self.fake.blends and "kv_transfer_params" in body else None
            answer = _answer(self._is_chat, "".join(PIECES))
            self._send(200, {**answer, "usage": USAGE, "kv_transfer_params": blended})

    @property
    def _is_chat(self):
        return self.path.endswith("/chat/completions")

    def _send(self, status, answer):
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, body):
        self.close_connection = True
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for piece in PIECES:
            self._event(_chunk(self._is_chat, piece))
        while self.fake.endless:
            self._event(_chunk(self._is_chat, "more "))
            time.sleep(0.01)
        self._event(_chunk(self._is_chat, "", "stop"))
        if (body.get("stream_options") or {}).get("include_usage"):
            self._event({**_chunk(self._is_chat, ""), "choices": [], "usage": USAGE})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, event):
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()


def _answer(is_chat, text):
    said = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
    choice = {"index": 0, "finish_reason": "stop", "logprobs": None, **said}
    kind = "chat.completion" if is_chat else "text_completion"
    return {"id": "1", "object": kind, "created": 0, "model": MODEL, "choices": [choice]}


def _chunk(is_chat, piece, reason=None):
    said = {"delta": {"role": "assistant", "content": piece}} if is_chat else {"text": piece}
    choice = {"index": 0, "finish_reason": reason, "logprobs": None, **said}
    kind = "chat.completion.chunk" if is_chat else "text_completion"
    return {"id": "1", "object": kind, "created": 0, "model": MODEL, "choices": [choice]}
