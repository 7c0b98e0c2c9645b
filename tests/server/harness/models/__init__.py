"""The models that these tests serve: small graphs, each with one thing worth testing.

Each function takes the model's name and, as keywords, any other field of `Model`. `models.exports` has signatures of
real exporters.
"""

from harness.models.control_inputs import UNUSUAL, controls
from harness.models.fixed_states import accumulate, axes, counter, crossed, echo, lstm, many_states, speech_like
from harness.models.growing_states import append, attention, caches, half_way, looked_up, queue
from harness.models.implicit_state import implicit
from harness.models.inputs import defaults, framed, framed_or_fails, knob, voiced
from harness.models.ledger import booked, ledger
from harness.models.outputs import open_shapes, two_inputs, with_a_loss
from harness.models.ragged import HALVES, LENGTH, RAW, WIDTH, cached, masked, padded_lstm
from harness.models.repeated import greedy_decoder, spoken
from harness.models.runs import fails, quantized, slow, work
from harness.models.stateful_backend import (
    accumulate_fp32,
    accumulate_int32,
    mixed_io_bool_int8,
    mixed_io_int32_fp16,
    summed,
)
from harness.models.windows import cut, cut_counted, cut_pair, echo_canceller
