"""Makes the models of this folder with real exporters. `requirements.txt` has their versions.

    python make.py [NAME ...]

The models are committed, so that tests need no exporter. Weights are random and small.
"""

import pathlib
import sys
import warnings

import numpy as np
import onnx
import torch
from torch import nn

warnings.filterwarnings("ignore")
FOLDER = pathlib.Path(__file__).parent
FEATURES, HIDDEN, OUT = 4, 8, 3
MAKERS = {}


def maker(make):
    MAKERS[make.__name__] = make
    return make


def batch_first():
    return torch.randn(2, 5, FEATURES)


def save_torch(name, model, inputs, names, outputs, dynamic, opset=17):
    """torch's exporter that traces (the older one)."""
    torch.onnx.export(
        model.eval(), inputs, str(FOLDER / f"{name}.onnx"), input_names=names, output_names=outputs,
        dynamic_axes=dynamic, opset_version=opset, dynamo=False,
    )


def save_dynamo(name, model, inputs, names, outputs, shapes):
    """torch's exporter of today."""
    program = torch.onnx.export(
        model.eval(), inputs, input_names=names, output_names=outputs, dynamic_shapes=shapes, opset_version=20,
        dynamo=True, verbose=False,
    )
    for value in program.model.graph.all_nodes():
        value.metadata_props.clear()
        value.doc_string = None
    program.save(str(FOLDER / f"{name}.onnx"), external_data=False)


BATCH_TIME = {"x": {0: "batch", 1: "time"}, "y": {0: "batch", 1: "time"}}


class Net(nn.Module):
    """A recurrent layer and a dense one."""

    def __init__(self, rnn, width=HIDDEN, last=False, states=False):
        super().__init__()
        self.r, self.out = rnn, nn.Linear(width, OUT)
        self.last, self.states = last, states

    def forward(self, x):
        y, states = self.r(x)
        y = self.out(y[:, -1] if self.last else y)
        return (y, *states) if self.states else y


@maker
def torch_lstm2():
    save_torch("torch_lstm2", Net(nn.LSTM(FEATURES, HIDDEN, 2, batch_first=True)), batch_first(), ["x"], ["y"], BATCH_TIME)


@maker
def torch_lstm_time_major():
    dynamic = {"x": {0: "time", 1: "batch"}, "y": {0: "time", 1: "batch"}}
    model = Net(nn.LSTM(FEATURES, HIDDEN))
    save_torch("torch_lstm_time_major", model, torch.randn(5, 2, FEATURES), ["x"], ["y"], dynamic)


@maker
def torch_lstm_last():
    dynamic = {"x": {0: "batch", 1: "time"}, "y": {0: "batch"}}
    model = Net(nn.LSTM(FEATURES, HIDDEN, batch_first=True), last=True)
    save_torch("torch_lstm_last", model, batch_first(), ["x"], ["y"], dynamic)


@maker
def torch_lstm_returned():
    dynamic = {**BATCH_TIME, "hn": {1: "batch"}, "cn": {1: "batch"}}
    model = Net(nn.LSTM(FEATURES, HIDDEN, 2, batch_first=True), states=True)
    save_torch("torch_lstm_returned", model, batch_first(), ["x"], ["y", "hn", "cn"], dynamic)


class Learned(nn.Module):
    def __init__(self):
        super().__init__()
        self.r, self.out = nn.LSTM(FEATURES, HIDDEN, 2, batch_first=True), nn.Linear(HIDDEN, OUT)
        self.h, self.c = nn.Parameter(torch.randn(2, 1, HIDDEN)), nn.Parameter(torch.randn(2, 1, HIDDEN))

    def forward(self, x):
        n = x.shape[0]
        return self.out(self.r(x, (self.h.expand(2, n, HIDDEN).contiguous(), self.c.expand(2, n, HIDDEN).contiguous()))[0])


@maker
def torch_lstm_learned():
    save_torch("torch_lstm_learned", Learned(), batch_first(), ["x"], ["y"], BATCH_TIME)


class Given(nn.Module):
    def __init__(self):
        super().__init__()
        self.r, self.out = nn.LSTM(FEATURES, HIDDEN, 2, batch_first=True), nn.Linear(HIDDEN, OUT)

    def forward(self, x, h0, c0):
        y, (h, c) = self.r(x, (h0, c0))
        return self.out(y), h, c


@maker
def torch_lstm_given():
    dynamic = {**BATCH_TIME, **{name: {1: "batch"} for name in ("h0", "c0", "hn", "cn")}}
    states = (torch.zeros(2, 2, HIDDEN), torch.zeros(2, 2, HIDDEN))
    save_torch("torch_lstm_given", Given(), (batch_first(), *states), ["x", "h0", "c0"], ["y", "hn", "cn"], dynamic)


@maker
def torch_gru():
    save_torch("torch_gru", Net(nn.GRU(FEATURES, HIDDEN, batch_first=True)), batch_first(), ["x"], ["y"], BATCH_TIME)


@maker
def torch_rnn_relu():
    model = Net(nn.RNN(FEATURES, HIDDEN, nonlinearity="relu", batch_first=True))
    save_torch("torch_rnn_relu", model, batch_first(), ["x"], ["y"], BATCH_TIME)


@maker
def torch_lstm_bidirectional():
    model = Net(nn.LSTM(FEATURES, HIDDEN, batch_first=True, bidirectional=True), width=2 * HIDDEN)
    save_torch("torch_lstm_bidirectional", model, batch_first(), ["x"], ["y"], BATCH_TIME)


@maker
def torch_lstm_static():
    model = Net(nn.LSTM(FEATURES, HIDDEN, 2, batch_first=True))
    save_torch("torch_lstm_static", model, torch.randn(3, 5, FEATURES), ["x"], ["y"], None)


@maker
def torch_lstm_batch_one():
    dynamic = {"x": {1: "time"}, "y": {1: "time"}}
    model = Net(nn.LSTM(FEATURES, HIDDEN, 2, batch_first=True))
    save_torch("torch_lstm_batch_one", model, torch.randn(1, 5, FEATURES), ["x"], ["y"], dynamic)


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.r, self.out = nn.LSTM(FEATURES, HIDDEN, batch_first=True), nn.Linear(HIDDEN, OUT)

    def forward(self, x, lens):
        packed = nn.utils.rnn.pack_padded_sequence(x, lens, batch_first=True, enforce_sorted=False)
        y, _ = nn.utils.rnn.pad_packed_sequence(self.r(packed)[0], batch_first=True)
        return self.out(y)


@maker
def torch_lstm_packed():
    dynamic = {**BATCH_TIME, "lens": {0: "batch"}}
    save_torch("torch_lstm_packed", Packed(), (batch_first(), torch.tensor([5, 3])), ["x", "lens"], ["y"], dynamic)


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.r = nn.LSTMCell(FEATURES, HIDDEN)

    def forward(self, x, h, c):
        return self.r(x, (h, c))


@maker
def torch_lstm_cell():
    inputs = (torch.randn(2, FEATURES), torch.zeros(2, HIDDEN), torch.zeros(2, HIDDEN))
    names, outputs = ["x", "h", "c"], ["hn", "cn"]
    save_torch("torch_lstm_cell", Cell(), inputs, names, outputs, {name: {0: "batch"} for name in names + outputs})


class Script(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.width = nn.LSTMCell(FEATURES, HIDDEN), HIDDEN

    def forward(self, x):
        h = torch.zeros(x.shape[1], self.width)
        c = torch.zeros(x.shape[1], self.width)
        ys = []
        for i in range(x.shape[0]):
            h, c = self.cell(x[i], (h, c))
            ys.append(h)
        return torch.stack(ys, 1)


class ScriptSum(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.width = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, HIDDEN), HIDDEN

    def forward(self, x):
        h = torch.zeros(x.shape[1], self.width)
        acc = torch.zeros(x.shape[1], self.width)
        for i in range(x.shape[0]):
            h = torch.tanh(self.a(x[i]) + self.b(h))
            acc = acc + h
        return acc, h


TIME_BATCH = {0: "time", 1: "batch"}


@maker
def torch_script_loop():
    dynamic = {"x": TIME_BATCH, "y": {0: "batch", 1: "time"}}
    save_torch("torch_script_loop", torch.jit.script(Script()), (torch.randn(5, 2, FEATURES),), ["x"], ["y"], dynamic)


@maker
def torch_script_sum():
    dynamic = {"x": TIME_BATCH, "acc": {0: "batch"}, "h": {0: "batch"}}
    save_torch("torch_script_sum", torch.jit.script(ScriptSum()), (torch.randn(5, 2, FEATURES),), ["x"], ["acc", "h"], dynamic)


@maker
def torch_unrolled():
    save_torch("torch_unrolled", Script(), (torch.randn(5, 2, FEATURES),), ["x"], ["y"], {"x": {1: "batch"}, "y": {0: "batch"}})


class ConvFront(nn.Module):
    """Two causal convolutions, one of them dilated, then a GRU: a keyword spotter's shape."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv1d(FEATURES, HIDDEN, 3), nn.Conv1d(HIDDEN, HIDDEN, 3, dilation=2)
        self.norm = nn.BatchNorm1d(HIDDEN)
        self.r, self.out = nn.GRU(HIDDEN, HIDDEN, batch_first=True), nn.Linear(HIDDEN, OUT)

    def forward(self, x):
        x = x.transpose(1, 2)
        x = torch.relu(self.norm(self.a(nn.functional.pad(x, (2, 0)))))
        x = torch.relu(self.b(nn.functional.pad(x, (4, 0)))) + x
        return self.out(self.r(x.transpose(1, 2))[0])


@maker
def torch_conv_gru():
    save_torch("torch_conv_gru", ConvFront(), batch_first(), ["x"], ["y"], BATCH_TIME)


class Tcn(nn.Module):
    """Convolutions that pad both ends and cut the end off, as many TCNs do."""

    def __init__(self):
        super().__init__()
        self.a = nn.Conv1d(FEATURES, HIDDEN, 3, padding=2)
        self.b = nn.Conv1d(HIDDEN, HIDDEN, 3, padding=8, dilation=4)

    def forward(self, x):
        x = torch.relu(self.a(x)[:, :, :-2])
        return torch.relu(self.b(x)[:, :, :-8]) + x


@maker
def torch_tcn():
    dynamic = {"x": {0: "batch", 2: "time"}, "y": {0: "batch", 2: "time"}}
    save_torch("torch_tcn", Tcn(), torch.randn(2, FEATURES, 16), ["x"], ["y"], dynamic)


class Strided(nn.Module):
    """A causal convolution and a pooling that halve the rate."""

    def __init__(self):
        super().__init__()
        self.a, self.r = nn.Conv1d(FEATURES, HIDDEN, 3, stride=2), nn.LSTM(HIDDEN, HIDDEN, batch_first=True)

    def forward(self, x):
        x = nn.functional.pad(x.transpose(1, 2), (1, 0))
        x = nn.functional.max_pool1d(torch.relu(self.a(x)), 2)
        return self.r(x.transpose(1, 2))[0]


@maker
def torch_strided():
    save_torch("torch_strided", Strided(), torch.randn(2, 8, FEATURES), ["x"], ["y"], {"x": {0: "batch", 1: "time"}})


class Denoiser(nn.Module):
    """A streaming denoiser as they are published: states outside, each dimension fixed, one row."""

    def __init__(self, merges):
        super().__init__()
        self.conv, self.merges = nn.Conv2d(1, 4, (5, 3), padding=(0, 1)), merges
        width = 4 if merges else 64
        self.r, self.out = nn.GRU(width, HIDDEN, batch_first=True), nn.Linear(HIDDEN, 1 if merges else 16)

    def forward(self, x, conv_cache, rnn_cache):
        y = torch.cat([conv_cache, x.unsqueeze(1)], 2)
        z = torch.relu(self.conv(y))
        rows = z.permute(0, 3, 2, 1).reshape(16, 1, 4) if self.merges else z.permute(0, 2, 1, 3).reshape(1, 1, 64)
        g, rnn_cache = self.r(rows, rnn_cache)
        mask = torch.sigmoid(self.out(g))
        return x * mask.reshape(1, 1, 16), y[:, :, 1:], rnn_cache


@maker
def torch_denoiser():
    names, outputs = ["x", "conv_cache", "rnn_cache"], ["y", "conv_cache_out", "rnn_cache_out"]
    for name, merges, rows in (("torch_denoiser", False, 1), ("torch_denoiser_merged", True, 16)):
        inputs = torch.randn(1, 1, 16), torch.zeros(1, 1, 4, 16), torch.zeros(1, rows, HIDDEN)
        save_torch(name, Denoiser(merges), inputs, names, outputs, None)


class DualPath(nn.Module):
    """Two blocks of a recurrence over frequencies, both ways, and one over time, as speech enhancers have them. The
    states of the second are frequencies × rows, stacked."""

    def __init__(self):
        super().__init__()
        gru = lambda **more: nn.GRU(HIDDEN, HIDDEN, batch_first=True, **more)  # noqa: E731
        self.up, self.down = nn.Linear(2, HIDDEN), nn.Linear(HIDDEN, 2)
        self.intra = nn.ModuleList(gru(bidirectional=True) for _ in range(2))
        self.join = nn.ModuleList(nn.Linear(2 * HIDDEN, HIDDEN) for _ in range(2))
        self.inter = nn.ModuleList(gru() for _ in range(2))
        self.norm = nn.LayerNorm((16, HIDDEN))

    def forward(self, x, inter_cache):
        z, caches = self.up(x), []
        for block in range(2):
            n, t, f, c = z.shape
            over_f = self.join[block](self.intra[block](z.reshape(n * t, f, c))[0])
            z = z + self.norm(over_f.reshape(n, t, f, c))
            over_t, cache = self.inter[block](z.permute(0, 2, 1, 3).reshape(n * f, t, c), inter_cache[block])
            z = z + over_t.reshape(n, f, t, c).permute(0, 2, 1, 3)
            caches.append(cache)
        return self.down(z), torch.stack(caches)


@maker
def torch_dual_path():
    inputs = torch.randn(1, 1, 16, 2), torch.zeros(2, 1, 16, HIDDEN)
    names, outputs = ["x", "inter_cache"], ["y", "inter_cache_out"]
    save_torch("torch_dual_path", DualPath(), inputs, names, outputs, None)


class Same(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.r = nn.Conv1d(FEATURES, HIDDEN, 3, padding=1), nn.LSTM(HIDDEN, HIDDEN, batch_first=True)

    def forward(self, x):
        return self.r(self.a(x.transpose(1, 2)).transpose(1, 2))[0]


@maker
def torch_conv_same():
    save_torch("torch_conv_same", Same(), batch_first(), ["x"], ["y"], BATCH_TIME)


class Mixing(nn.Module):
    def __init__(self, mix):
        super().__init__()
        self.r, self.mix = nn.LSTM(FEATURES, HIDDEN, batch_first=True), mix
        self.q, self.norm = nn.Linear(HIDDEN, HIDDEN), nn.InstanceNorm1d(HIDDEN)

    def forward(self, x):
        y = self.r(x)[0]
        if self.mix == "mean":
            return y.mean(1)
        if self.mix == "center":
            return y - y.mean(1, keepdim=True)
        if self.mix == "flip":
            return y.flip(1)
        if self.mix == "norm":
            return self.norm(y.transpose(1, 2))
        return torch.softmax(self.q(y) @ y.transpose(1, 2), -1) @ y


@maker
def torch_mixing():
    for mix in ("mean", "center", "flip", "norm", "attention"):
        dynamic = {"x": {0: "batch", 1: "time"}}
        save_torch(f"torch_mixing_{mix}", Mixing(mix), batch_first(), ["x"], ["y"], dynamic)


def dynamo_shapes():
    return ({0: torch.export.Dim("batch"), 1: torch.export.Dim("time")},)


@maker
def dynamo_lstm():
    save_dynamo("dynamo_lstm", Net(nn.LSTM(FEATURES, HIDDEN, 2, batch_first=True)), (batch_first(),), ["x"], ["y"], dynamo_shapes())


@maker
def dynamo_lstm_learned():
    save_dynamo("dynamo_lstm_learned", Learned(), (batch_first(),), ["x"], ["y"], dynamo_shapes())


@maker
def dynamo_gru():
    save_dynamo("dynamo_gru", Net(nn.GRU(FEATURES, HIDDEN, batch_first=True)), (batch_first(),), ["x"], ["y"], dynamo_shapes())


@maker
def dynamo_rnn_unrolled():
    shapes = ({0: torch.export.Dim("batch")},)
    save_dynamo("dynamo_rnn_unrolled", Net(nn.RNN(FEATURES, HIDDEN, batch_first=True)), (batch_first(),), ["x"], ["y"], shapes)


class HigherOrderScan(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        def step(h, now):
            h = torch.tanh(self.a(now) + self.b(h))
            return h, h.clone()

        h = torch.zeros(x.shape[1], HIDDEN)
        return torch._higher_order_ops.scan(step, h, x, dim=0)[1]


@maker
def dynamo_scan():
    shapes = ({0: torch.export.Dim("time"), 1: torch.export.Dim("batch")},)
    save_dynamo("dynamo_scan", HigherOrderScan(), (torch.randn(5, 2, FEATURES),), ["x"], ["y"], shapes)


def save_keras(name, model, shape=(None, None, FEATURES)):
    import tensorflow as tf
    import tf2onnx

    function = tf.function(lambda x: model(x, training=False))
    signature = [tf.TensorSpec(shape, tf.float32, name="x")]
    exported, _ = tf2onnx.convert.from_function(function, signature, opset=17)
    onnx.save(exported, FOLDER / f"{name}.onnx")


def keras_model(*layers, features=FEATURES):
    import keras

    return keras.Sequential([keras.layers.Input((None, features)), *layers, keras.layers.Dense(OUT)])


@maker
def keras_lstm2():
    from keras.layers import LSTM

    save_keras("keras_lstm2", keras_model(LSTM(HIDDEN, return_sequences=True), LSTM(HIDDEN, return_sequences=True)))


@maker
def keras_lstm_last():
    from keras.layers import LSTM

    save_keras("keras_lstm_last", keras_model(LSTM(HIDDEN)))


@maker
def keras_gru():
    from keras.layers import GRU

    save_keras("keras_gru", keras_model(GRU(HIDDEN, return_sequences=True)))


@maker
def keras_gru_reset_before():
    from keras.layers import GRU

    save_keras("keras_gru_reset_before", keras_model(GRU(HIDDEN, return_sequences=True, reset_after=False)))


@maker
def keras_simple_rnn():
    from keras.layers import SimpleRNN

    save_keras("keras_simple_rnn", keras_model(SimpleRNN(HIDDEN, return_sequences=True)))


@maker
def keras_masking():
    from keras.layers import LSTM, Masking

    save_keras("keras_masking", keras_model(Masking(), LSTM(HIDDEN, return_sequences=True)))


@maker
def keras_bidirectional():
    from keras.layers import LSTM, Bidirectional

    save_keras("keras_bidirectional", keras_model(Bidirectional(LSTM(HIDDEN, return_sequences=True))))


@maker
def keras_causal_conv():
    from keras.layers import LSTM, Conv1D

    layers = Conv1D(HIDDEN, 3, padding="causal"), Conv1D(HIDDEN, 3, padding="causal", dilation_rate=2)
    save_keras("keras_causal_conv", keras_model(*layers, LSTM(HIDDEN, return_sequences=True)))


@maker
def keras_stateful():
    import keras
    from keras.layers import LSTM

    model = keras.Sequential([
        keras.layers.Input(batch_shape=(1, None, FEATURES)), LSTM(HIDDEN, return_sequences=True, stateful=True),
        keras.layers.Dense(OUT),
    ])
    model.predict(np.random.rand(1, 4, FEATURES).astype(np.float32), verbose=0)
    save_keras("keras_stateful", model, (1, None, FEATURES))


@maker
def quantized_lstm():
    from onnxruntime.quantization import QuantType, quantize_dynamic

    source = FOLDER / "torch_lstm2.onnx"
    quantize_dynamic(source, FOLDER / "quantized_lstm.onnx", weight_type=QuantType.QInt8, op_types_to_quantize=["LSTM", "MatMul"])


def main():
    wanted = sys.argv[1:] or list(MAKERS)
    for name in wanted:
        torch.manual_seed(7)
        np.random.seed(7)
        try:
            MAKERS[name]()
            print("made", name, flush=True)
        except Exception as error:  # noqa: BLE001
            print("FAILED", name, type(error).__name__, str(error)[:300], flush=True)


if __name__ == "__main__":
    main()
