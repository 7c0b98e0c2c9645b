"""The protocols: requests as tritonclient's calls, and its results and exceptions as outputs and errors."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Generator, Mapping
from queue import SimpleQueue
from types import ModuleType
from typing import Any, Protocol

import aiohttp
import grpc
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from geventhttpclient.response import HTTPParseError
from tritonclient.utils import InferenceServerException

from triton_stateful.errors import Unavailable, of_server
from triton_stateful.messages import Describe, Outputs, Parameter, Request
from triton_stateful.model import Model


class Transport(Protocol):
    """Sends a request and waits for its answer. Raises StatefulError."""

    #: Whether it may send a request a second time after a lost connection, without telling.
    sends_twice: bool

    def infer(self, request: Request) -> Outputs: ...

    def stream(self, request: Request) -> Generator[Outputs, None, None]:
        """The answers to a request to a decoupled model, each when it comes. Closing it cancels the request."""

    def describe(self, asked: Describe) -> Model: ...

    def close(self) -> None: ...


class AsyncTransport(Protocol):
    """The same for asyncio."""

    sends_twice: bool

    async def infer(self, request: Request) -> Outputs: ...

    def stream(self, request: Request) -> AsyncGenerator[Outputs, None]: ...

    async def describe(self, asked: Describe) -> Model: ...

    async def close(self) -> None: ...


def of_client(client: Any) -> Transport:
    """The transport of a client. A text is an address: `host:port` for gRPC, `http://host:port` for HTTP."""
    if isinstance(client, str):
        address, is_http = _address(client)
        library: ModuleType = tritonclient.http if is_http else tritonclient.grpc
        client = library.InferenceServerClient(address)
    if isinstance(client, tritonclient.grpc.InferenceServerClient):
        return Grpc(client)
    if isinstance(client, tritonclient.http.InferenceServerClient):
        return Http(client)
    raise TypeError(f"a client of tritonclient.grpc or tritonclient.http, or a Stream, is expected, not {client!r}")


def of_async_client(client: Any) -> AsyncTransport:
    """The same for the clients of tritonclient.grpc.aio and tritonclient.http.aio."""
    if isinstance(client, str):
        address, is_http = _address(client)
        library: ModuleType = tritonclient.http.aio if is_http else tritonclient.grpc.aio
        client = library.InferenceServerClient(address)
    if isinstance(client, tritonclient.grpc.aio.InferenceServerClient):
        return AsyncGrpc(client)
    if isinstance(client, tritonclient.http.aio.InferenceServerClient):
        return AsyncHttp(client)
    raise TypeError(f"a client of tritonclient.grpc.aio or tritonclient.http.aio is expected, not {client!r}")


def _address(text: str) -> tuple[str, bool]:
    scheme, separator, rest = text.partition("://")
    if not separator:
        return text, False
    if scheme not in ("grpc", "http"):
        raise ValueError(f"address '{text}' has scheme '{scheme}', but grpc or http is expected")
    return rest, scheme == "http"


# ---- what the protocols share


def arguments(library: ModuleType, request: Request) -> dict[str, Any]:
    """What `infer` and `async_stream_infer` of all clients take."""
    inputs = []
    for tensor in request.inputs:
        made = library.InferInput(tensor.name, list(tensor.value.shape), tensor.datatype)
        inputs.append(made.set_data_from_numpy(tensor.value))
    outputs = None if request.outputs is None else [library.InferRequestedOutput(name) for name in request.outputs]
    return {
        "model_name": request.model,
        "model_version": request.version,
        "inputs": inputs,
        "outputs": outputs,
        "sequence_id": request.sequence_id,
        "sequence_start": request.start,
        "sequence_end": request.end,
        "parameters": dict(request.parameters),
    }


def _headers(request: Request) -> dict[str, str]:
    # tritonclient changes what it is given
    return dict(request.headers)


def grpc_outputs(result: Any) -> Outputs:
    """The outputs of a result of tritonclient.grpc."""
    response = result.get_response()
    outputs = {tensor.name: result.as_numpy(tensor.name) for tensor in response.outputs}
    return Outputs(outputs, {name: _value(parameter) for name, parameter in response.parameters.items()})


def _value(parameter: Any) -> Parameter:
    value: Parameter = getattr(parameter, parameter.WhichOneof("parameter_choice"))
    return value


def _http_outputs(result: Any) -> Outputs:
    response = result.get_response()
    outputs = {tensor["name"]: result.as_numpy(tensor["name"]) for tensor in response.get("outputs", ())}
    return Outputs(outputs, response.get("parameters"))


def refuse_decoupled(request: Request, protocol: str) -> None:
    raise TypeError(
        f"model '{request.model}' answers each step by itself (decoupled), which {protocol} can't carry: give the sequence "
        "a client of tritonclient.grpc or tritonclient.grpc.aio, or an address of gRPC"
    )


def _http_arguments(request: Request) -> dict[str, Any]:
    if request.decoupled:
        refuse_decoupled(request, "HTTP")
    if request.timeout is not None:
        raise ValueError("HTTP has one timeout for all requests: give it to the client of tritonclient.http")
    return arguments(tritonclient.http, request)


#: The configurations that were read, by client, model and version.
_models: weakref.WeakKeyDictionary[Any, dict[tuple[str, str], Model]] = weakref.WeakKeyDictionary()


def _known(client: Any, asked: Describe) -> Model | None:
    return _models.get(client, {}).get((asked.model, asked.version))


def _read(client: Any, asked: Describe, config: Mapping[str, Any]) -> Model:
    model = Model.read(asked.model, config)
    _models.setdefault(client, {})[asked.model, asked.version] = model
    return model


#: What the libraries raise if a connection ends, or cannot be made, or gives no answer in time.
_LOST = (OSError, asyncio.TimeoutError, HTTPParseError, aiohttp.ClientConnectionError, aiohttp.ClientPayloadError)


class _Translated:
    """Raises the errors of this package for those of tritonclient and of the connection."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, InferenceServerException):
            raise of_server(error) from error
        if isinstance(error, grpc.aio.AioRpcError):
            # tritonclient hands on those of its streams for asyncio as they are.
            made = InferenceServerException(error.details() or "", str(error.code()))
            raise of_server(made, of_stream=True) from error
        if isinstance(error, _LOST):
            raise Unavailable(f"{type(error).__name__}: {error}") from error


translated = _Translated()


# ---- the protocols


#: What a call gets that has no answer.
_nothing = (Outputs({}),)


class Grpc:
    """gRPC, one call a request."""

    sends_twice = False

    def __init__(self, client: Any) -> None:
        self.client = client

    def infer(self, request: Request) -> Outputs:
        if request.decoupled:
            # A call of the State API has one answer, or none.
            return (*_nothing, *self.stream(request))[-1]
        with translated:
            more = arguments(tritonclient.grpc, request)
            return grpc_outputs(self.client.infer(**more, client_timeout=request.timeout, headers=_headers(request)))

    def stream(self, request: Request) -> Generator[Outputs, None, None]:
        more = arguments(tritonclient.grpc, request)
        came: SimpleQueue[tuple[Any, Any]] = SimpleQueue()
        with translated:
            self.client.start_stream(lambda result, error: came.put((result, error)), headers=_headers(request))
        is_over = False
        try:
            with translated:
                self.client.async_stream_infer(**more, enable_empty_final_response=True)
            while not is_over:
                result, error = came.get()
                if error is not None:
                    raise of_server(error, of_stream=True) from error
                answer = grpc_outputs(result)
                is_over = bool(answer.parameters.pop("triton_final_response", False))
                # After the last step comes an answer without anything if the server could not know that it was the last.
                if answer or answer.parameters:
                    yield answer
        finally:
            self.client.stop_stream(cancel_requests=not is_over)

    def describe(self, asked: Describe) -> Model:
        with translated:
            return _known(self.client, asked) or _read(
                self.client, asked, self.client.get_model_config(asked.model, asked.version, as_json=True)["config"]
            )

    def close(self) -> None:
        self.client.close()


class Http:
    """HTTP. Its client is for one thread, and sends a request again if the connection ends before the answer."""

    sends_twice = True

    def __init__(self, client: Any) -> None:
        self.client = client

    def infer(self, request: Request) -> Outputs:
        more = _http_arguments(request)
        with translated:
            return _http_outputs(self.client.infer(**more, headers=_headers(request)))

    def stream(self, request: Request) -> Generator[Outputs, None, None]:
        refuse_decoupled(request, "HTTP")
        yield from ()

    def describe(self, asked: Describe) -> Model:
        with translated:
            return _known(self.client, asked) or _read(
                self.client, asked, self.client.get_model_config(asked.model, asked.version)
            )

    def close(self) -> None:
        self.client.close()


class AsyncGrpc:
    """gRPC for asyncio, one call a request."""

    sends_twice = False

    def __init__(self, client: Any) -> None:
        self.client = client

    async def infer(self, request: Request) -> Outputs:
        if request.decoupled:
            return [*_nothing, *[answer async for answer in self.stream(request)]][-1]
        with translated:
            more = arguments(tritonclient.grpc, request)
            answer = await self.client.infer(**more, client_timeout=request.timeout, headers=_headers(request))
            return grpc_outputs(answer)

    async def stream(self, request: Request) -> AsyncGenerator[Outputs, None]:
        async def requests() -> AsyncGenerator[dict[str, Any], None]:
            yield arguments(tritonclient.grpc, request)

        # The server ends the stream after the last answer, because no other request comes.
        with translated:
            call = self.client.stream_infer(requests(), headers=_headers(request))
        try:
            while True:
                try:
                    with translated:
                        result, error = await call.__anext__()
                except StopAsyncIteration:
                    return
                if error is not None:
                    raise of_server(error) from error
                answer = grpc_outputs(result)
                answer.parameters.pop("triton_final_response", None)
                if answer or answer.parameters:
                    yield answer
        finally:
            call.cancel()

    async def describe(self, asked: Describe) -> Model:
        with translated:
            return _known(self.client, asked) or _read(
                self.client,
                asked,
                (await self.client.get_model_config(asked.model, asked.version, as_json=True))["config"],
            )

    async def close(self) -> None:
        await self.client.close()


class AsyncHttp:
    """HTTP for asyncio."""

    sends_twice = False

    def __init__(self, client: Any) -> None:
        self.client = client

    async def infer(self, request: Request) -> Outputs:
        more = _http_arguments(request)
        with translated:
            return _http_outputs(await self.client.infer(**more, headers=_headers(request)))

    async def stream(self, request: Request) -> AsyncGenerator[Outputs, None]:
        refuse_decoupled(request, "HTTP")
        yield Outputs({})

    async def describe(self, asked: Describe) -> Model:
        with translated:
            return _known(self.client, asked) or _read(
                self.client, asked, await self.client.get_model_config(asked.model, asked.version)
            )

    async def close(self) -> None:
        await self.client.close()
