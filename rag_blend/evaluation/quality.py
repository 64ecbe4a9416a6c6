"""The quality bench: every policy against full prefill, on the same token ids of the same cases."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rag_blend.chunk import digest_json
from rag_blend.engine import BlendEngine, Storage
from rag_blend.evaluation import prompts
from rag_blend.evaluation.cases import Case, ingestible
from rag_blend.evaluation.environment import environment_of
from rag_blend.evaluation.journal import Journal, configuration_of
from rag_blend.evaluation.policies import Policy
from rag_blend.evaluation.reference import GREEDY, reference_of, require_fit
from rag_blend.evaluation.report import QualityReport
from rag_blend.evaluation.results import Answer, CaseResult, Fidelity, Measurement
from rag_blend.generation import Generation
from rag_blend.storage import open_storage
from rag_blend.teacher import forced_logits

_MORE_TO_COPY = 8  # a copied text may be tokenised a little differently, and its end must be seen


class QualityBench:
    """Measures how close policies come to full prefill, and how much faster they are.

    The reference of a case is the greedy answer of full prefill. Each policy prefills the same prompt, and one
    forward over the reference's tokens (teacher forcing) gives its logits at every position of the answer.

    Args:
        model: The model; all policies share it.
        tokenizer: Its tokenizer.
        storage: Where caches live, see `BlendEngine`; all policies share it.
        policies: What is compared; names must differ.
        max_new_tokens: Longest answer. Cases of copying get what their text needs.
        out: Directory in which each case's result is kept, and looked for before it is measured again; results of
            another model, prompt, policy or code are not used. None: results live in memory only.
        num_floors: On how many cases of each group the floors are measured: full prefill again, and with ratio 1.

    Raises:
        UnsupportedModelError: The model cannot be blended correctly.
        ValueError: No policies, two of one name, or an argument of one that the engine refuses.
        OSError: `storage` or `out` cannot be used.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        storage: Storage,
        policies: Sequence[Policy],
        max_new_tokens: int = 32,
        out: str | os.PathLike[str] | None = None,
        num_floors: int = 5,
    ) -> None:
        names = [policy.name for policy in policies]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"policies need names of their own, and there must be one; got {names}")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
        self._model = model
        self._tokenizer = tokenizer
        self._policies = list(policies)
        self._max_new_tokens = max_new_tokens
        self._out = out
        self._num_floors = num_floors
        self._warm = False
        with ExitStack() as stack:
            backend = open_storage(storage)
            stack.callback(backend.close)
            groups = {policy.group: policy for policy in policies}
            self._engines = {
                # Without kept prompts: a policy must not find what another one has computed of the same prompt.
                group: BlendEngine(
                    model,
                    tokenizer,
                    backend,
                    **{"reuse_when": "possible", "on_unsupported": "measured", **policy.engine_arguments},
                    prefix_cache_bytes=0,
                )
                for group, policy in groups.items()
            }
            self._open = stack.pop_all()

    def __enter__(self) -> QualityBench:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the storage; the model stays the caller's."""
        self._open.close()

    def prepare(self, cases: Sequence[Case], progress: bool = True) -> None:
        """Prefill and store all passages of the cases, once per way of priming. What is stored is not done again.

        Args:
            cases: The cases.
            progress: Show a progress bar.

        Raises:
            PromptTooLongError: A case does not fit the context window; nothing has been stored then.
            OSError: The storage refused.
        """
        plain = next(iter(self._engines.values()))
        for case in cases:
            require_fit(plain, case, len(prompts.case_ids(self._tokenizer, case)), self._room(case))
        documents = ingestible(cases)
        head = prompts.head_ids(self._tokenizer)
        for engine in self._engines.values():
            engine.ingest(list(documents), head=head, doc_ids=list(documents.values()), progress=progress)

    def run(self, cases: Sequence[Case], progress: bool = True) -> QualityReport:
        """Measure the cases; `prepare` them first, or there is nothing to reuse.

        The policies' order rotates from case to case. A policy's own text is generated only where its most likely
        token differs from the reference somewhere: otherwise greedy decoding would repeat the reference.

        Args:
            cases: The cases; those with a result in `out` are not measured again.
            progress: Show a progress bar.

        Raises:
            PromptTooLongError: A case does not fit the context window.
            OSError: `out` cannot be written.
        """
        journal = None if self._out is None else Journal(self._out, self._configuration())
        known = {} if journal is None else journal.results
        results: list[CaseResult] = []
        of_group: Counter[str] = Counter()
        for number, case in enumerate(tqdm(cases, desc="cases", disable=not progress)):
            ids = prompts.case_ids(self._tokenizer, case)
            key = digest_json([case.id, case.group, case.answers, ids])
            result = known.get(key)
            of_group[case.group] += 1
            if result is None:
                result = self._measure(case, key, ids, number, of_group[case.group] <= self._num_floors)
                if journal is not None:
                    journal.append(result)
            results.append(result)
        environment = {**environment_of(self._model), "max_new_tokens": str(self._max_new_tokens)}
        return QualityReport(results, environment, [policy.describe() for policy in self._policies])

    def _configuration(self) -> dict[str, Any]:
        return configuration_of(
            self._model,
            self._tokenizer,
            policies=[policy.describe() for policy in self._policies],
            max_new_tokens=self._max_new_tokens,
            floors=self._num_floors,
        )

    def _measure(self, case: Case, key: str, ids: list[int], number: int, with_floors: bool) -> CaseResult:
        turn = number % len(self._policies)
        order = self._policies[turn:] + self._policies[:turn]
        plain = next(iter(self._engines.values()))  # for what does not depend on the policy
        if not self._warm:
            self._warm_up(plain, ids)
        reference, logits = reference_of(plain, ids, self._room(case))
        answer = Answer.to(case, reference.text, len(reference.token_ids))
        floors = {}
        if with_floors:
            floors["full again"] = self._compared(plain, ids, reference, logits, reuse=False)
            floors["r = 1"] = self._compared(plain, ids, reference, logits, recompute_ratio=1.0)
        measured = {policy.name: self._of_policy(policy, case, ids, reference, logits) for policy in order}
        return CaseResult(
            key=key,
            case_id=case.id,
            group=case.group,
            answerable=case.answerable,
            order=tuple(policy.name for policy in order),
            full=Measurement.of(reference.stats, answer=answer),
            floors=floors,
            policies={policy.name: measured[policy.name] for policy in self._policies},
        )

    def _warm_up(self, plain: BlendEngine, ids: list[int]) -> None:
        """Lazy imports, page cache, thread pools: the first run of anything is not like the others."""
        plain.prefill(ids, reuse=False)
        for policy in self._policies:
            self._engines[policy.group].prefill(ids, **policy.call_arguments)
        self._warm = True

    def _of_policy(
        self, policy: Policy, case: Case, ids: list[int], reference: Generation, logits: torch.Tensor
    ) -> Measurement:
        engine = self._engines[policy.group]
        measured = self._compared(engine, ids, reference, logits, **policy.call_arguments)
        assert measured.fidelity is not None
        generation = reference
        if measured.fidelity.agreement < 1.0:
            generation = engine.generate(ids, self._room(case), **policy.call_arguments, **GREEDY)
        return replace(measured, answer=Answer.to(case, generation.text, len(generation.token_ids)))

    def _compared(
        self, engine: BlendEngine, ids: list[int], reference: Generation, logits: torch.Tensor, **how: Any
    ) -> Measurement:
        """One prefill, compared with the reference along its answer. Its cache is gone when this returns."""
        prefill = engine.prefill(ids, **how)
        forced = forced_logits(self._model, prefill, reference.token_ids)
        return Measurement.of(prefill.stats, Fidelity.between(logits, forced))

    def _room(self, case: Case) -> int:
        if case.task != "copy":
            return self._max_new_tokens
        wanted = self._tokenizer(list(case.answers), add_special_tokens=False)["input_ids"]
        return max(self._max_new_tokens, max(map(len, wanted)) + _MORE_TO_COPY)
