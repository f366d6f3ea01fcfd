"""prime-rl: a proxy between its orchestrator and inference servers that do not share the trainer's disk. Written
against prime-rl's source, not run.

    python -m trainer_node.frameworks.prime_rl outputs/run/broadcasts \\
        --engine 127.0.0.1:9001=http://gpu-1:8000 --engine 127.0.0.1:9002=http://gpu-2:8000 --folder /weights

The orchestrator's admin URLs name the proxy. The orchestrator pauses all servers, has each load ``weight_dir``, and
resumes them. The proxy holds ``/pause`` until engines serve the newest finished broadcast, so that servers are
paused for the load alone. It holds ``/update_weights`` until every rollout machine has the folder, and names the path
there. All other requests pass as they are.

Guarantee: if each of ``--hosts`` rollout machines has a peer, a server never loads a folder other than the one that the
trainer has finished, by its content. If a folder is not everywhere in time the answer is 503, the request does not
reach the server, and prime-rl tries again.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath

import click
from aiohttp import ClientError, ClientSession, ClientTimeout, DummyCookieJar, web
from multidict import CIMultiDict
from yarl import URL

from p2pcast.checkpoint.folder_form import MARKERS, StepNames
from p2pcast.cli import exit_code
from p2pcast.daemon import application_server
from p2pcast.daemon.daemon_requests import DEFAULT_URL
from p2pcast.daemon.request_body import BodyTooLargeError, read_json
from p2pcast.ground.addresses import parse_address
from p2pcast.ground.errors import P2PCastError, UsageError
from p2pcast.ground.limits import KIB
from p2pcast.process import event_loop
from p2pcast.process.daemon_process import run_until_signal
from trainer_node.frameworks.live_folder import wait_live

PAUSE_WAIT_S, UPDATE_WAIT_S = 240.0, 600.0
"""Longest holds in seconds: within prime-rl's limits for one attempt, 300 s and 720 s."""
LAST = MARKERS["prime-rl"].last
ADAPTER = "adapter_config.json"
"""In the folder of a LoRA adapter, which passes by another route."""
MOST_BODY_BYTES = 64 * KIB
BODY_S = 10.0
"""Largest body of a request for new weights, and the time limit for it in seconds."""
CONNECT_S = 10.0
END_S = 5.0
"""Longest time for open requests to end, once the proxy has to."""
_OF_ONE_HOP = frozenset(
    ("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding",
     "upgrade", "host", "content-length")
)  # fmt: skip
"""Headers that belong to one connection; the body's length is found anew."""


@dataclass(frozen=True, slots=True)
class Broadcasts:
    """The trainer's folders, and the hub that publishes them. ``hosts``: the number of rollout machines."""

    checkpoints: Path
    hub: str
    hosts: int = 1

    async def live(self, name: str, timeout_s: float) -> None:
        """Returns once the hosts have what the folder holds. Raises P2PCastError."""
        await asyncio.to_thread(partial(wait_live, self.hub, name, hosts=self.hosts, timeout_s=timeout_s))

    def newest(self) -> str | None:
        """The folder of the newest finished broadcast of a whole model. Blocks."""
        finished = [path.parent for path in self.checkpoints.glob(f"*/{LAST}")]
        steps = {StepNames().step_of(path.name): path.name for path in finished if not (path / ADAPTER).exists()}
        return max(((step, name) for step, name in steps.items() if step is not None), default=(0, None))[1]


class EngineProxy:
    """Requests for one server. ``engine``: its URL. ``folder``: of the peers' ``safetensors:`` target on every rollout
    machine; None: the trainer's own path.
    """

    def __init__(self, engine: str, broadcasts: Broadcasts, folder: PurePath | None, session: ClientSession) -> None:
        self._engine = engine.rstrip("/")
        self._broadcasts = broadcasts
        self._folder = folder
        self._session = session

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/pause", self._pause)
        app.router.add_post("/update_weights", self._update_weights)
        app.router.add_route("*", "/{path:.*}", self._pass)
        return app

    async def _pause(self, request: web.Request) -> web.StreamResponse:
        newest = await asyncio.to_thread(self._broadcasts.newest)
        return await self._hold(newest, PAUSE_WAIT_S) or await self._pass(request)

    async def _update_weights(self, request: web.Request) -> web.StreamResponse:
        try:
            body = await read_json(request, MOST_BODY_BYTES, BODY_S)
            path = body["weight_dir"]
            name = None if path is None else PurePath(path).name
        except BodyTooLargeError as error:
            return _error(413, str(error))
        except (UsageError, KeyError, TypeError):
            return _error(400, 'a request for new weights is {"weight_dir": PATH}')
        if held := await self._hold(name, UPDATE_WAIT_S):
            return held
        if name is not None and self._folder is not None:
            body["weight_dir"] = str(self._folder / name)
        return await self._pass(request, json.dumps(body).encode())

    async def _hold(self, folder: str | None, timeout_s: float) -> web.Response | None:
        """Wait for the folder; an answer if the request must not go on."""
        try:
            if folder is not None:
                await self._broadcasts.live(folder, timeout_s)
        except UsageError as error:
            return _error(400, str(error))
        except P2PCastError as error:
            return _error(503, str(error))
        return None

    async def _pass(self, request: web.Request, body: bytes | None = None) -> web.StreamResponse:
        """Send the request on, and the answer back, as they come. ``body``: in place of the request's own."""
        try:
            answer = await self._session.request(
                request.method,
                URL(f"{self._engine}{request.raw_path}", encoded=True),
                headers=_passed(request.headers),
                data=request.content if body is None and request.can_read_body else body,
                allow_redirects=False,
            )
        except (ClientError, OSError) as error:
            return _error(502, f"{self._engine} does not answer: {error}")
        async with answer:
            response = web.StreamResponse(status=answer.status, reason=answer.reason, headers=_passed(answer.headers))
            await response.prepare(request)
            try:
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
            except ClientError:
                # Half an answer must not look whole.
                if request.transport is not None:
                    request.transport.abort()
        return response


def _passed(headers: Mapping[str, str]) -> CIMultiDict[str]:
    named = {name.strip().lower() for name in headers.get("Connection", "").split(",")}
    left_out = _OF_ONE_HOP | named
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in left_out)


def _error(status: int, text: str) -> web.Response:
    return web.json_response({"error": text}, status=status)


@asynccontextmanager
async def serving(
    engines: Sequence[tuple[tuple[str, int], str]], broadcasts: Broadcasts, folder: PurePath | None
) -> AsyncIterator[list[tuple[str, int]]]:
    """A proxy for each pair of an address and a server's URL; the addresses on which they listen. Raises LocalError
    when an address is not available.
    """
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(
            ClientSession(
                auto_decompress=False,
                cookie_jar=DummyCookieJar(),
                skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
                timeout=ClientTimeout(total=None, sock_connect=CONNECT_S),
            )
        )
        addresses = []
        for (host, port), engine in engines:
            app = EngineProxy(engine, broadcasts, folder, session).app()
            addresses.append(await stack.enter_async_context(application_server.serving(app, (host, port), END_S)))
        yield addresses


def _engine(text: str) -> tuple[tuple[str, int], str]:
    listen, equals, url = text.partition("=")
    if not equals or not url.startswith(("http://", "https://")):
        raise UsageError(f"--engine {text!r}: write HOST:PORT=http://SERVER:PORT")
    return parse_address(listen, default_host="127.0.0.1"), url


@click.command()
@click.argument("checkpoints", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option(
    "--engine",
    "engines",
    multiple=True,
    required=True,
    metavar="HOST:PORT=URL",
    help="Address of the proxy for the inference server at URL; repeatable.",
)
@click.option(
    "--folder",
    type=click.Path(path_type=PurePath),
    help="The peers' safetensors:DIR on the rollout machines.  [default: the path of CHECKPOINTS]",
)
@click.option("--hub", default=DEFAULT_URL, help="URL of the hub's HTTP server.")
@click.option("--hosts", type=click.IntRange(1), default=1, help="Number of rollout machines that must have a folder.")
def main(checkpoints: Path, engines: tuple[str, ...], folder: PurePath | None, hub: str, hosts: int) -> None:
    """Hold prime-rl's switches until the rollout machines have the weights in CHECKPOINTS."""
    broadcasts = Broadcasts(checkpoints, hub, hosts)

    async def work() -> None:
        async with serving([_engine(text) for text in engines], broadcasts, folder) as addresses:
            for (host, port), text in zip(addresses, engines, strict=True):
                print(f"{host}:{port} stands for {text.partition('=')[2]}", flush=True)
            await asyncio.Event().wait()

    sys.exit(exit_code(lambda: event_loop.run(run_until_signal(work))))


if __name__ == "__main__":
    main()
