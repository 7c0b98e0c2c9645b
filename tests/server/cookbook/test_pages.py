"""The cookbook's pages: their configurations are loaded, and their clients run, against models with real signatures."""

from __future__ import annotations

import re
import subprocess
import wave
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest

from cookbook.by_hand import ByHand, Steps
from cookbook.pages import PAGES, Page, export, pieces
from harness.conversations import together
from harness.models import quantized
from harness.models.families import FAMILIES
from harness.models.generated import decoder
from harness.python_backend import with_python_backend
from support.oracle import Oracle
from support.paths import CONVERT, INSPECT, RECORDING, ROOT
from triton_stateful import Sequence

#: Models of the pages, without a script of the Python backend.
MODELS = [(name, model) for name, page in PAGES.items() for model in page.models if page.fixture(model) != "script"]

#: The size of a batch that each model gets.
BATCHES = {
    "silero_vad": 64,
    "silero_vad_legacy": 64,
    "melspectrogram": 1,
    "embedding": 64,
    "zipformer": 64,
    "fastconformer": 64,
    "decoder_joint": 64,
    "agent.stateful": 64,
    "lstm.stateful": 64,
    "decoder": 64,
    "decoder.stateful": 64,
    "merged_decoder": 64,
    "int8": 64,
}


def whole(seed: int, *shape: int) -> np.ndarray:
    """Whole numbers, whose sums are exact."""
    return np.random.default_rng(seed).integers(-8, 9, shape).astype(np.float32)


def page_of(model: str) -> Page:
    [page] = [page for page in PAGES.values() if model in page.models]
    return page


def graph(page: Page, model: str) -> bytes:
    fixture = page.fixture(model)
    if fixture == "ensemble":
        return b""
    made = quantized(fixture) if fixture == "quantized" else export(fixture)
    return made.build().SerializeToString()


@pytest.fixture
def load(cookbook_deployment):
    """Loads models of a page, once."""

    def loaded(page: Page, *models: str) -> None:
        for model in models:
            if model not in cookbook_deployment.loaded:
                for step in page.steps(model):
                    loaded(page_of(step), step)
                page.write(model, graph(page, model), cookbook_deployment.repository)
                cookbook_deployment.admin.load_model(model)
                cookbook_deployment.loaded[model] = ""

    return loaded


@pytest.fixture
def agrees(cookbook_deployment, load):
    """Runs a page's client twice at once, with other data, and compares with ONNX Runtime stepped by hand."""

    def check(page: str, function: str, models: dict[str, Steps], *each_data: tuple, instead_of=None) -> list:
        load(PAGES[page], *models)
        served = PAGES[page].client(function, cookbook_deployment.server.grpc_url, instead_of=instead_of)
        by_hand = PAGES[page].client(function, "nowhere", ByHand(models), instead_of)
        answers = together(lambda data=data: served(*data) for data in each_data)
        for answer, data in zip(answers, each_data, strict=True):
            expected = by_hand(*data)
            for came, want in zip(answer, expected, strict=True):
                np.testing.assert_allclose(came, want, rtol=1e-6)
        first, second, *_ = answers
        assert len(first) and len(second) and not np.array_equal(first, second), "the data says nothing"
        return answers

    return check


@pytest.mark.parametrize(("page", "model"), MODELS, ids=[model for _, model in MODELS])
def test_a_configuration_is_served(cookbook_deployment, load, page, model):
    load(PAGES[page], model)
    config = cookbook_deployment.admin.get_model_config(model).config
    assert config.max_batch_size == BATCHES.get(model, 0)


@pytest.mark.parametrize(("page", "model"), MODELS, ids=[model for _, model in MODELS])
def test_a_configuration_follows_the_advice_for_known_models(tmp_path, page, model):
    if PAGES[page].fixture(model) == "ensemble":
        pytest.skip("it has no graph")
    PAGES[page].write(model, graph(PAGES[page], model), tmp_path)
    [file] = tmp_path.glob("*/1/*.onnx")
    configs = [f"--config={config}" for config in tmp_path.glob("*/config.pbtxt")]
    said = subprocess.run([INSPECT, file, "--quiet", *configs], capture_output=True, text=True, check=True)
    assert "the signature is that of" not in said.stderr


#: A line of a message, with a parameter and its value; with other quotation marks, one of a configuration.
PARAMETER = r"\{ key: '(\w+)' value \{ string_value: '([^']*)' \} \}"
#: Parameters of pages that nothing needs, or that no signature shows.
NOT_ADVISED = {
    "max_rows_per_run",
    "state_api",
    "nemo_decoder: state_dims",
    "nemo_decoder: state_pairs",
    "wenet: input_context",
    "wenet: input_windows",
    *(
        f"openwakeword{of}: {parameter}"
        for of in ("", "_embedding", "_mel")
        for parameter in ("input_context", "input_windows")
    ),
}


#: Models that need parameters, with those.
WITH_PARAMETERS = {
    model: (page, parameters)
    for page, model in MODELS
    if (parameters := re.findall(PARAMETER.replace("'", '"'), PAGES[page].models[model][1]))
}


@pytest.mark.parametrize("model", WITH_PARAMETERS)
def test_stateful_inspect_tells_the_lines_of_the_page(tmp_path, model):
    page, shown = WITH_PARAMETERS[model]
    fixture = PAGES[page].fixture(model)
    file = tmp_path / "model.onnx"
    file.write_bytes(graph(PAGES[page], model))
    wanted = [line for line in shown if not {line[0], f"{fixture}: {line[0]}"} & NOT_ADVISED]
    needed = [line for line in wanted if line[0] != "input_windows"]
    assert len(needed) <= 3, "a model needs three lines at most, and one for requests of any length"
    written: list[tuple[str, str]] = []
    # What it has told is written, and then it may tell more.
    while len(written) < len(wanted):
        arguments = [f"-p{name}={value}" for name, value in written]
        said = subprocess.run([INSPECT, file, "--quiet", *arguments], capture_output=True, text=True).stderr
        told = [line for line in re.findall(PARAMETER, said) if line in wanted and line not in written]
        assert told, f"{written} are written, {wanted} are wanted: {said}"
        written += told


def steps(model: str, **how) -> dict[str, Steps]:
    return {model: Steps(export(page_of(model).fixture(model)), **how)}


def test_voice_activity(agrees):
    how = {"constants": {"sr": 16000}, "context": {"input": (64, 1, False)}, "windows": {"input": (512, 1, False)}}
    data = (pieces(whole(1, 20 * 512)),), (pieces(whole(2, 30 * 512 + 100)),)
    answers = agrees("vad.md", "speech", steps("silero_vad", **how), *data)
    assert [len(answer) for answer in answers] == [20, 30]


def test_wake_words(agrees):
    models = {
        **steps("melspectrogram", context={"input": (480, 1, False)}, windows={"input": (1280, 1, False)}),
        **steps("embedding", context={"input_1": (68, 1, False)}, windows={"input_1": (8, 1, False)}),
        **steps("hey_jarvis", context={"x.1": (15, 1, False)}, windows={"x.1": (1, 1, False)}),
    }
    # A step of the first graph has one frame here, and eight of the real one.
    data = (pieces(whole(1, 16 * 1280)),), (pieces(whole(2, 24 * 1280)),)
    answers = agrees("wake-word.md", "scores", models, *data)
    assert [len(answer) for answer in answers] == [2, 3]


def test_a_denoiser_that_takes_spectra(agrees):
    agrees("denoiser.md", "denoise_frames", steps("gtcrn.stateful"), (whole(1, 4000),), (whole(2, 5000),))


def test_a_denoiser_of_two_graphs(agrees):
    models = steps("dtln_1") | steps("dtln_2")
    agrees("denoiser.md", "denoise_blocks", models, (whole(1, 2000),), (whole(2, 3000),))


def test_a_denoiser_that_takes_samples(agrees):
    models = steps("deep_filter_net", constants={"atten_lim_db": 0}, windows={"input_frame": (480, 0, True)})
    data = (pieces(whole(1, 4800)),), (pieces(whole(2, 4300)),)
    answers = agrees("denoiser.md", "denoise_samples", models, *data)
    assert [len(answer) for answer in answers] == [4800, 9 * 480]


def test_zipformer(agrees):
    models = steps("zipformer", context={"x": (13, 1, True)}, windows={"x": (32, 1, True)})
    agrees("asr-encoder.md", "encode", models, (pieces(whole(1, 200, 80)),), (pieces(whole(2, 300, 80)),))


def test_features_of_samples(cookbook_deployment):
    """The answers are what kaldi-native-fbank gives."""
    page, name = PAGES["asr-encoder.md"], "kaldi snip_edges=false high_freq=-400"
    [options] = re.findall(
        r"^build/bin/stateful-convert graph (.*) -o models/fbank/1/model.onnx$", page.text, re.MULTILINE
    )
    written = [
        CONVERT,
        "graph",
        *options.split(),
        "-o",
        Path(cookbook_deployment.repository) / "fbank" / "1" / "model.onnx",
    ]
    subprocess.run(written, check=True, capture_output=True)
    cookbook_deployment.admin.load_model("fbank")
    with wave.open(str(RECORDING)) as file:
        samples = np.frombuffer(file.readframes(30 * 16000), np.int16).astype(np.float32) / np.float32(32768)
    answers = page.client("features", cookbook_deployment.server.grpc_url)(pieces(samples))
    references = np.load(ROOT / "crates" / "convert" / "tests" / "features" / "reference.npz")[name]
    frames = np.concatenate(answers, axis=1)[0, ::50]
    assert len(frames) >= 59, "the last frames wait for more samples"
    np.testing.assert_allclose(frames, references[: len(frames)], rtol=0, atol=3e-4)


#: Each chunk becomes 16 frames.
WENET = {"generated": {"offset": lambda step, fed: 16 * step}}


def test_wenet(agrees):
    models = steps("wenet", **WENET)
    agrees("asr-encoder.md", "encode_chunks", models, (whole(1, 300, 80),), (whole(2, 450, 80),))


def test_wenet_in_pieces(agrees):
    models = steps("wenet_pieces", **WENET, context={"chunk": (3, 1, True)}, windows={"chunk": (64, 1, True)})
    agrees("asr-encoder.md", "encode_pieces", models, (pieces(whole(1, 300, 80)),), (pieces(whole(2, 450, 80)),))


def test_fastconformer(agrees):
    how = {"context": {"audio_signal": (9, 2, True)}, "windows": {"audio_signal": (112, 2, True)}}
    models = steps("fastconformer", constants={"length": 121}, **how)
    data = (pieces(whole(1, 80, 400), axis=1),), (pieces(whole(2, 80, 600), axis=1),)
    agrees("asr-encoder.md", "encode_signal", models, *data)


def greedy(frames: np.ndarray) -> list[int]:
    """The greedy search with ONNX Runtime alone: a state is kept only where a token was found."""
    signature = FAMILIES["nemo_decoder_joint"]()
    oracle = Oracle(signature.build().SerializeToString(), signature.pairs)
    state, tokens = {name: np.zeros((1, 1, 640), np.float32) for name in signature.pairs}, [1024]
    for frame in frames:
        for _ in range(10):
            inputs = {"encoder_outputs": frame, "targets": np.array([[tokens[-1]]], np.int32)}
            names = [output.name for output in oracle.session.get_outputs()]
            feeds = {**inputs, "target_length": np.array([1], np.int32), **state}
            results = dict(zip(names, oracle.session.run(names, feeds), strict=True))
            token = int(results["outputs"].argmax())
            if token == 1024:
                break
            tokens.append(token)
            state = {source: results[target] for source, target in signature.pairs.items()}
    return tokens[1:]


def test_rnnt(agrees):
    frames = [whole(seed, 40, 1, 512, 1) for seed in (1, 2)]
    answers = agrees("rnnt.md", "transcribe", steps("decoder_joint"), *((part,) for part in frames))
    assert answers == [greedy(part) for part in frames]


def test_speech_synthesis(agrees):
    def voice(seed: int, length: int) -> dict[str, np.ndarray]:
        caches = {f"state_{at}": whole(seed + at, 2, 1, length, 16, 64) for at in range(0, 18, 3)}
        return caches | {f"state_{at + 2}": np.array([length]) for at in range(0, 18, 3)}

    def flow(conditioning):
        return np.sign(conditioning[:, None, :32])

    models = steps("flow_lm") | steps("mimi")
    # the model goes on while its sums are negative
    texts = [-abs(whole(1, 1, 5, 1024)), abs(whole(2, 1, 7, 1024))]
    data = [(voice(seed, 5 + seed), text, 12, flow) for seed, text in enumerate(texts)]
    answers = agrees("tts.md", "speak", models, *data)
    assert [answer.shape[2] for answer in answers] == [12 * 1920, 1920]


def test_a_voice_is_kept_from_a_sequence(cookbook_deployment, load):
    """As the page says: what `state()` returns is a voice."""
    load(PAGES["tts.md"], "flow_lm")
    text = {"sequence": np.zeros((1, 0, 32), np.float32), "text_embeddings": whole(1, 1, 4, 1024)}
    latent = {"sequence": whole(2, 1, 1, 32), "text_embeddings": np.zeros((1, 0, 1024), np.float32)}
    recording = {f"state_{at}": whole(at, 2, 1, 6, 16, 64) for at in range(0, 18, 3)}
    with Sequence(cookbook_deployment.server.grpc_url, "flow_lm", states=recording) as first:
        first.step(text)
        voice = first.state()
        with Sequence(cookbook_deployment.server.grpc_url, "flow_lm", states=voice) as second:
            expected = first.step(latent)["conditioning"]
            np.testing.assert_array_equal(second.step(latent)["conditioning"], expected)


def test_a_policy(agrees):
    agrees("robot-policy.md", "act", steps("policy.stateful"), (whole(1, 9, 1, 48),), (whole(2, 12, 1, 48),))


def test_an_agent(agrees):
    agrees("robot-policy.md", "play", steps("agent.stateful"), (whole(1, 9, 1, 8),), (whole(2, 12, 1, 8),))


def test_a_time_series(agrees):
    parts = [[whole(seed, 1, length, 1, 5) for length in (1, 7, 3)] for seed in (1, 2)]
    agrees("time-series.md", "forecast", steps("lstm.stateful"), *((part,) for part in parts))


def test_a_language_model(agrees):
    def positions(step, fed):
        past = fed["past_key_values.0.key"].shape[2]
        return np.arange(past, past + fed["input_ids"].shape[1])[None]

    def mask(step, fed):
        return np.ones((1, fed["past_key_values.0.key"].shape[2] + fed["input_ids"].shape[1]))

    models = steps("decoder", generated={"position_ids": positions, "attention_mask": mask})
    agrees("llm-decoder.md", "generate", models, ([5, 6, 7], 12), ([8, 9], 15))


def test_a_language_model_whose_client_sends_masks(cookbook_deployment, load):
    page = PAGES["llm-decoder.md"]
    load(page, "decoder.stateful")
    by_hand = ByHand(steps("decoder.stateful"))("", "decoder.stateful")
    past = 0
    with Sequence(cookbook_deployment.server.grpc_url, "decoder.stateful") as served:
        for ids in ([[5, 6, 7]], [[8]], [[9]], [[3, 4]]):
            length = len(ids[0])
            positions = np.arange(past, past + length)[None]
            past += length
            mask = np.ones((1, past), np.int64)
            inputs = {"input_ids": np.array(ids), "position_ids": positions, "attention_mask": mask}
            answers = served.step(inputs, end=past == 7)
            np.testing.assert_array_equal(answers["logits"], by_hand.step(inputs)["logits"])


def load_own(cookbook_deployment, page: Page, model: str, made: onnx.ModelProto) -> None:
    """Loads a graph that a page makes, with the configuration that it shows."""
    folder = Path(cookbook_deployment.repository) / model
    (folder / "1").mkdir(parents=True)
    onnx.checker.check_model(made)
    onnx.save(made, folder / "1" / "model.onnx")
    (folder / "config.pbtxt").write_text(page.file(f"{model}/config.pbtxt"))
    cookbook_deployment.admin.load_model(model)
    cookbook_deployment.loaded[model] = ""


def by_itself(made: onnx.ModelProto, prompt: list[int], count: int, last: int, state: Mapping[str, np.ndarray]):
    """The tokens that a decoder gives in a loop with ONNX Runtime alone."""
    states = {source.name for source in made.graph.input} - {"input_ids", "position_ids", "attention_mask"}
    pairs = {name: name.replace("past_key_values", "present").replace("random", "next_random") for name in states}
    tokens: list[int] = []
    oracle, past, ids = Oracle(made.SerializeToString(), pairs), 0, np.array([prompt])
    sequence = oracle.new_sequence()
    sequence.state = {name: oracle.zeros(name, {"past_sequence_length": 0}) for name in pairs} | dict(state)
    while len(tokens) < count and last not in tokens:
        now = past + ids.shape[1]
        answers = sequence.step(
            {
                "input_ids": ids,
                "position_ids": np.arange(past, now)[None],
                "attention_mask": np.ones((1, now), np.int64),
            }
        )
        ids, past = answers["next_token"], now
        tokens.append(int(ids.item()))
    return tokens


def test_a_language_model_goes_on_by_itself(cookbook_deployment):
    page = PAGES["llm-decoder.md"]
    made = page.client("with_next_token", "")(export("optimum_decoder").build())
    load_own(cookbook_deployment, page, "writer", made)
    write = page.client("write", cookbook_deployment.server.grpc_url)
    prompts = [[5, 6, 7], [8, 9], [1], [3, 4, 5, 6, 7, 8]]
    texts = together(lambda at=at, prompt=prompt: write(prompt, 20, at + 1) for at, prompt in enumerate(prompts))
    assert texts == [by_itself(made, prompt, 20, 2, {}) for prompt in prompts]
    assert len({tuple(text) for text in texts}) > 1


def test_a_graph_draws_with_its_random_state_as_a_state(cookbook_deployment):
    page, words = PAGES["sampling.md"], 16
    base = decoder("poet").build()
    made = page.client("with_sampling", "")(base, words)
    load_own(cookbook_deployment, page, "poet", made)
    dream = page.client("dream", cookbook_deployment.server.grpc_url)
    asked = [([5, 6, 7], 11), ([5, 6, 7], 12), ([8, 9], 11), ([5, 6, 7], 11)]
    texts = together(lambda at=at, of=of: dream(of[0], 20, of[1], at + 1) for at, of in enumerate(asked))
    for (prompt, seed), text in zip(asked, texts, strict=True):
        assert text == by_itself(made, prompt, 20, 2, {"random_state": np.array([[seed, 0]])})
    assert texts[0] == texts[3] and len({tuple(text) for text in texts}) == 3
    # It draws each token as often as the softmax of the logits says.
    session = Oracle(made.SerializeToString(), {}).session
    past = {source.name: np.zeros((1, 2, 0, 4), np.float32) for source in base.graph.input if "past" in source.name}
    fed = {
        "input_ids": np.array([[3]]),
        "position_ids": np.array([[0]]),
        "attention_mask": np.array([[1]]),
        **past,
    }
    draws, count = np.zeros(words), 4000
    for draw in range(count):
        token, logits = session.run(["next_token", "logits"], {**fed, "random_state": np.array([[7, draw]])})
        draws[token.item()] += 1
    shares = np.exp(logits[0, 0].astype(np.float64) / 0.8)
    expected = count * shares / shares.sum()
    assert ((draws - expected) ** 2 / expected).sum() < 40  # 15 degrees of freedom: the same draws each time


def test_a_limited_past(agrees):
    def offset(step, fed):
        return 16 * step + 64

    def mask(step, fed):
        return np.arange(80).reshape(1, 1, 80) >= 64 - 16 * step

    generated = {"offset": offset, "att_mask": mask}
    models = steps("wenet_limited", constants={"required_cache_size": 64}, generated=generated)
    data = (whole(1, 500, 80),), (whole(2, 450, 80),)
    agrees("asr-encoder.md", "encode_chunks", models, *data, instead_of={"wenet": "wenet_limited"})


def test_an_ensemble(cookbook_deployment, load, agrees):
    encoder, ctc = (ByHand(steps(model, **how)) for model, how in (("wenet", WENET), ("ctc", {})))
    page = PAGES["several-graphs.md"]
    load(page, "recogniser")
    features = [whole(seed, 330, 80) for seed in (1, 2)]
    served = page.client("tokens", cookbook_deployment.server.grpc_url)
    answers = together(lambda part=part: served(part) for part in features)

    class Both:
        """The steps of the ensemble by hand."""

        def __init__(self, address, model):
            self.sequences = [encoder(address, "wenet"), ctc(address, "ctc")]

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def step(self, chunk, *, end):
            hidden = self.sequences[0].step(chunk)["output"]
            return self.sequences[1].step(hidden)

    assert answers == [page.client("tokens", "nowhere", Both)(part) for part in features]
    assert answers[0] != answers[1] and len(answers[0]) == 5 * 67


@pytest.mark.parametrize("page", PAGES)
def test_clients_are_short(page):
    """Other code of a page, such as what changes a graph, may be longer."""
    for client in PAGES[page].clients:
        assert len(client.splitlines()) <= 20 or "localhost:8001" not in client, client


def test_a_script(deploy, tmp_path):
    """The greedy search of the RNN-T page, on the server: with the same tokens."""
    own = with_python_backend(deploy, tmp_path)
    rnnt, page = PAGES["rnnt.md"], PAGES["several-graphs.md"]
    rnnt.write("decoder_joint", graph(rnnt, "decoder_joint"), own.repository)
    for path in ("rnnt/config.pbtxt", "rnnt/1/model.py"):
        file = own.repository / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(page.file(path))
    for model in ("decoder_joint", "rnnt"):
        own.admin.load_model(model)
    by_hand = rnnt.client("transcribe", "nowhere", ByHand(steps("decoder_joint")))

    def talk(seed: int) -> list[int]:
        parts, tokens = whole(seed, 5, 1, 512, 6), [1024]
        with Sequence(own.server.grpc_url, "rnnt") as sequence:
            for number, part in enumerate(parts):
                inputs = {"FRAMES": part, "LAST": np.array([[tokens[-1]]], np.int32)}
                tokens += sequence.step(inputs, end=number == len(parts) - 1)["TOKENS"].ravel().tolist()
        return tokens[1:]

    for seed, tokens in enumerate(together(lambda seed=seed: talk(seed) for seed in range(3))):
        frames = np.concatenate(whole(seed, 5, 1, 512, 6), axis=2)
        assert tokens == by_hand([frames[:, :, at : at + 1] for at in range(30)])
        assert tokens
