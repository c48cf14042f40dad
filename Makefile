# make demo and make test are all a new machine needs; both create .venv with every package.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-minimum check format bench arena queue study classification docs wheel clean

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e ".[demo,dev]"
	touch $@

demo: $(VENV)/.ready  ## train four Bayesian methods on the Boston housing table and draw the results
	$(BIN)/eigenoise demo --out demo

test: check  ## lint, types and the whole test suite: what CI runs
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4

MINIMUM := .venv-minimum
MINIMUM_TESTS ?= tests --ignore tests/test_docs.py
test-minimum:  ## the tests with the oldest versions that pyproject.toml promises
	$(PYTHON) -m venv $(MINIMUM)
	$(MINIMUM)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints-minimum.txt \
		-e ".[demo,parquet,tensorboard]" pytest pytest-xdist hypothesis
	OMP_NUM_THREADS=1 $(MINIMUM)/bin/python -m pytest -n auto --maxprocesses 4 $(MINIMUM_TESTS)

check: $(VENV)/.ready  ## lint, format, types and the order of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(VENV)/.ready  ## put the code into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.ready  ## time a step of our methods on the small cases as a ratio to SGD, and name what grew
	$(BIN)/eigenoise bench a b --no-peers --no-memory --against benchmarks/results/bench/bench.json --out bench

arena: $(VENV)/.ready  ## compare methods after equal CPU time, which takes hours and continues where it was
	$(BIN)/eigenoise arena --out benchmarks/results/arena
	$(BIN)/python benchmarks/arena_pages.py

queue: $(VENV)/.ready  ## go on with the long studies, on one core at low priority, to be stopped at any time
	$(BIN)/python benchmarks/study_queue.py

RESULTS := benchmarks/results/uci
study: $(VENV)/.ready  ## run the regression study, which takes hours and continues where it was, and redraw its pages
	$(BIN)/eigenoise uci boston concrete energy wine yacht --preset paper --out $(RESULTS)
	$(BIN)/eigenoise uci --preset best --out $(RESULTS)
	$(BIN)/eigenoise uci --preset best --random --method noisy-ekfac --out $(RESULTS)
	$(BIN)/eigenoise uci --preset elbo --out $(RESULTS)
	$(BIN)/python benchmarks/study_pages.py

IMAGES := benchmarks/results/cifar10
FOUR := sgd,kfac,noisy-kfac,noisy-ekfac
classification: $(VENV)/.ready  ## run the classification study, also for hours and resumable, and redraw its pages
	for seed in 0 1; do for setting in "--bn --aug" "--no-bn --no-aug" "--bn --no-aug" "--no-bn --aug"; do \
		$(BIN)/eigenoise cifar10 --method $(FOUR) $$setting --seed $$seed --train-size 5000 --steps 400 \
			--out $(IMAGES) --resume || exit 1; \
	done; done
	$(BIN)/eigenoise cifar10 --method sgd,noisy-ekfac --bn --aug --epochs 4 --corrupted 500 --out $(IMAGES)_long --resume
	$(BIN)/python benchmarks/vision_pages.py

docs: $(VENV)/.ready  ## build the pages of docs/ into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

wheel: $(VENV)/.ready  ## build the wheel, install it into an empty environment and see that it works there
	$(BIN)/python -m build --wheel
	$(PYTHON) -m venv --clear build/empty
	build/empty/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	build/empty/bin/python tests/smoke.py

clean:
	rm -rf $(VENV) $(MINIMUM) demo bench build dist site
