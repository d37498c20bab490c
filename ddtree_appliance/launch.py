"""Start SGLang only if it is the patched one, DDTREE is really registered, and its arguments are sound.

SGLang reports a bad argument as a traceback and swallows a plugin's failure; here each is one line and an exit code.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from ddtree_appliance.errors import HostError, PatchError, UsageError
from ddtree_appliance.ports import not_free, reserve_port

# Names a file of keys that `serve` wrote for --config: it is removed as soon as SGLang has read it.
KEY_FILE_VARIABLE = "DDTREE_KEY_FILE"


def launch(sglang_arguments: Sequence[str]) -> int:
    """Run SGLang's server in this process with `sglang_arguments` until it stops.

    Raises PatchError if the installed SGLang is not the patched one, HostError if it is missing or DDTREE is not
    registered or the port is taken, UsageError for arguments that SGLang or DDTREE refuses; all before weights are
    loaded.
    """
    try:
        check_model_paths(sglang_arguments)
        check_patched()
        server_args = prepare(sglang_arguments)
        keep_ports(server_args)
    finally:
        if key_file := os.environ.pop(KEY_FILE_VARIABLE, None):
            Path(key_file).unlink(missing_ok=True)

    from sglang.launch_server import run_server
    from sglang.srt.utils import kill_process_tree

    keep_ending_under_uvicorn()
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
    return 0


def end_on_sigterm() -> None:
    """Until SGLang drains on SIGTERM by itself, end at once, with the process tree and the usual status 143.

    The image's init would end the tree too; without one, PID 1 of a container ignores SIGTERM that has no handler, and
    a stop during a long start ends in a kill. A SIGTERM that `sigterm_held` has kept back takes effect here.
    """
    # psutil comes with SGLang: where it is missing, nothing can be started, and the checks say so.
    with suppress(ModuleNotFoundError):
        signal.signal(signal.SIGTERM, _end_tree())
    # Before anything else runs: threads and children inherit the mask, and could not be terminated.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def keep_ending_under_uvicorn() -> None:
    """Let SIGTERM end the process also from uvicorn's start to the first request, at which SGLang takes it over.

    uvicorn's own handler would close the port, and SGLang's warm-up would then ask for two minutes whether it is open.
    """
    import uvicorn

    ours, theirs = signal.getsignal(signal.SIGTERM), uvicorn.Server.handle_exit

    def handle_exit(self: uvicorn.Server, sig: int, frame: FrameType | None) -> None:
        if sig == signal.SIGTERM and callable(ours):
            ours(sig, frame)
        theirs(self, sig, frame)

    uvicorn.Server.handle_exit = handle_exit  # type: ignore[method-assign]


def _end_tree() -> Callable[[int, object], None]:
    # Not in the handler: a signal amid the main thread's own import of it would raise there, where it may be swallowed.
    import psutil

    def end(signum: int, frame: object) -> None:
        try:
            for child in psutil.Process().children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    child.kill()
        finally:
            os._exit(128 + signum)

    return end


@contextmanager
def sigterm_held() -> Iterator[None]:
    """Hold a SIGTERM back while another program takes this process over and until it calls `end_on_sigterm`.

    An execve resets handlers, and PID 1 of a container without an init ignores SIGTERM until there is one again. The
    mask and a pending signal survive it, and what is blocked is never ignored.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def check_model_paths(sglang_arguments: Sequence[str]) -> None:
    """Refuse a model folder that does not exist or holds no config.json, before SGLang asks a model hub for it."""
    parser = _PathParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model-path", "--model", dest="model")
    parser.add_argument("--speculative-draft-model-path", "--speculative-draft-model", dest="drafter")
    given, _ = parser.parse_known_args(list(sglang_arguments))
    for flag, value in (("--model-path", given.model), ("--speculative-draft-model-path", given.drafter)):
        if value is None or not value.startswith(("/", ".", "~")):
            continue
        folder = Path(value)
        if not folder.is_dir():
            raise UsageError(f"{flag}: {value} is not a folder", "mount it, or correct the path")
        if not (folder / "config.json").is_file():
            raise UsageError(f"{flag}: {value} holds no config.json", "point at the folder of one complete checkpoint")


class _PathParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def check_patched() -> None:
    """Refuse an SGLang whose files differ from the patch manifest. Raises PatchError."""
    from ddtree_appliance.patching import verify_installed

    report = verify_installed()
    if report.problems:
        raise PatchError(
            "the installed SGLang is not the patched one: " + "; ".join(report.problems),
            "install the wheel that `ddtree-appliance patches apply` builds",
        )


def keep_ports(server_args: Any) -> None:
    """Keep the ports that SGLang will listen on, once weights are loaded, from connections and most others.

    SGLang itself finds out minutes later: a taken HTTP port leaves it waiting for its own warm-up, and the port that it
    has chosen for the ranks' rendezvous and let go may have become a connection's. Only another server that is loading
    for the same port is not seen. Raises HostError for a port that is taken.
    """
    address, port = server_args.host.strip("[]"), server_args.port
    try:
        reserve_port(address, port)
    except OSError as error:
        raise not_free(address, port, error) from error
    # Data-parallel replicas need one each, and draw it themselves.
    if server_args.nccl_port is None and server_args.dp_size == 1:
        server_args.override("ddtree-appliance launch", nccl_port=reserve_port("0.0.0.0"))


@contextmanager
def _one_line_usage_errors() -> Iterator[None]:
    # SGLang makes its own parser, whose errors come behind a usage text of several hundred lines.
    original = argparse.ArgumentParser.error

    def error(self: argparse.ArgumentParser, message: str) -> NoReturn:
        raise UsageError(message)

    argparse.ArgumentParser.error = error  # type: ignore[method-assign]
    try:
        yield
    finally:
        argparse.ArgumentParser.error = original  # type: ignore[method-assign]


def prepare(sglang_arguments: Sequence[str]) -> Any:
    """SGLang's ServerArgs for `sglang_arguments`, with plugins loaded. Raises HostError or UsageError."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    load_plugins()
    try:
        SpeculativeAlgorithm.from_string("DDTREE")
    except ValueError as error:
        raise HostError(
            "DDTREE is not registered with SGLang", "its log above says why; is ddtree-appliance installed beside it?"
        ) from error
    try:
        with _one_line_usage_errors():
            return prepare_server_args(list(sglang_arguments))
    except (ValueError, AssertionError, OSError, NotImplementedError) as error:
        raise UsageError(" ".join(str(error).split()) or repr(error), "see ddtree-appliance launch --help") from error
    except RuntimeError as error:
        # torch's word for a GPU that is missing or does not start.
        raise HostError(" ".join(str(error).split()) or repr(error), "does nvidia-smi show the GPU here?") from error
