"""A model of Triton's Python backend: the greedy search of all requests of an execution at once.

It asks the joint once a frame for all of them. The last token and the predictor's states of each sequence stay here, by its
id. The benchmark replaces the constants.
"""

import itertools
import random

import numpy as np
import triton_python_backend_utils as pb_utils

START = pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
END = pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END
BLANK, MAX_TOKENS, WIDE = 499, 1, 256


class TritonPythonModel:
    def initialize(self, args):
        #: The last token and the two states `[1, 1, WIDE]`, by the id of the sequence.
        self.sequences = {}
        #: Ids of calls, other ones in each instance.
        self.calls = itertools.count(random.randrange(1, 2**62))

    def execute(self, requests):
        ids = [request.correlation_id() for request in requests]
        for sequence, request in zip(ids, requests, strict=True):
            if request.flags() & START:
                self.sequences[sequence] = (BLANK, *[np.zeros((1, 1, WIDE), np.float32)] * 2)
        frames = np.concatenate(
            [pb_utils.get_input_tensor_by_name(request, "FRAMES").as_numpy() for request in requests]
        )
        try:
            found = self.search(ids, frames)
        except pb_utils.TritonModelException as error:
            return [pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error)))] * len(requests)
        for sequence, request in zip(ids, requests, strict=True):
            if request.flags() & END:
                del self.sequences[sequence]
        tensors = [pb_utils.Tensor("TOKENS", np.array([tokens], np.int32)) for tokens in found]
        return [pb_utils.InferenceResponse(output_tensors=[tensor]) for tensor in tensors]

    def search(self, ids, frames):
        """The tokens of each row of `frames`, `[rows, WIDE, frames]`."""
        kept = [self.sequences[sequence] for sequence in ids]
        last = np.array([[token] for token, _, _ in kept], np.int32)
        states = [np.concatenate([row[1 + number] for row in kept], axis=1) for number in range(2)]
        found = [[] for _ in ids]
        for at in range(frames.shape[2]):
            active = np.ones(len(ids), bool)
            for _ in range(MAX_TOKENS):
                logits, *new = self.call(frames[:, :, at : at + 1], last, states)
                tokens = logits.reshape(len(ids), -1).argmax(1)
                active &= tokens != BLANK
                if not active.any():
                    break
                last[active, 0] = tokens[active]
                states = [np.where(active[None, :, None], one, old) for one, old in zip(new, states, strict=True)]
                for row in np.flatnonzero(active):
                    found[row].append(tokens[row])
        for row, sequence in enumerate(ids):
            self.sequences[sequence] = (last[row, 0], *[state[:, row : row + 1] for state in states])
        return found

    def call(self, frame, last, states):
        inputs = {
            "encoder_outputs": np.ascontiguousarray(frame),
            "targets": last,
            "target_length": np.ones(len(last), np.int32),
            "hidden": states[0],
            "cell": states[1],
        }
        names = ["outputs", "after_1", "after_2"]
        response = pb_utils.InferenceRequest(
            model_name="predictor_and_joint",
            requested_output_names=names,
            inputs=[pb_utils.Tensor(name, value) for name, value in inputs.items()],
            # The model has no states: each call is a sequence of its own.
            correlation_id=next(self.calls),
            flags=START | END,
        ).exec()
        if response.has_error():
            raise pb_utils.TritonModelException(response.error().message())
        return [pb_utils.get_output_tensor_by_name(response, name).as_numpy() for name in names]
