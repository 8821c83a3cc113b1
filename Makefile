# `make demo` and `make test` do all of their own set-up; see `make help`.
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-gpu faults soak fuzz lint docs package clean

help:
	@echo 'make demo    have the simulated robot cross a street by what it imagines, and write report.html to out/demo/'
	@echo 'make test    run all tests'
	@echo 'make test-gpu    run those that need a GPU, on one'
	@echo 'make faults  have every fault of docs/faults.md happen to running robots, and write what came of it'
	@echo 'make soak    drive for an hour with random faults:    make soak ARGS="--minutes 3"'
	@echo 'make fuzz    throw damaged bytes, messages and calls at whatever takes them from outside, for about an hour'
	@echo 'make lint    check the style of the code, the configuration and the workflows'
	@echo 'make docs    build the documentation as a web site, in build/docs/'
	@echo 'make package    build the source distribution and the wheel, in dist/, and check them'
	@echo 'make setup   only prepare: system packages (apt), .venv, and this project in it'
	@echo 'make clean   remove .venv, .envs, build output and generated modules; out/, with results and models of yours, stays'
	@echo
	@echo 'ARGS is passed on:    make demo ARGS="--help"    make test ARGS="-k gate -x"'
	@echo 'PYTHON chooses the interpreter of .venv (3.10 to 3.12):    make setup PYTHON=python3.12'

setup:
	@PYTHON='$(PYTHON)' tools/setup.sh

demo: setup
	.venv/bin/worldmodel demo $(ARGS)

test:
	@PYTHON='$(PYTHON)' tools/setup.sh --tests
	-@tools/openpi_env.sh
	.venv/bin/python tools/run_tests.py $(ARGS)

test-gpu:
	@PYTHON='$(PYTHON)' tools/setup.sh --tests
	.venv/bin/python -m pytest -m gpu -rs $(ARGS)

faults:
	@PYTHON='$(PYTHON)' tools/setup.sh --tests
	.venv/bin/python test/faults/run.py $(ARGS)

soak:
	@PYTHON='$(PYTHON)' tools/setup.sh --tests
	.venv/bin/python test/faults/soak.py $(ARGS)

fuzz:
	@PYTHON='$(PYTHON)' tools/setup.sh --tests
	.venv/bin/python benchmarks/fuzz.py --out out/fuzz/fuzz.json $(ARGS)

lint:
	@PYTHON='$(PYTHON)' tools/group_env.sh lint
	.envs/lint/bin/ruff check $(ARGS)
	.envs/lint/bin/yamllint --strict .github config docs .pre-commit-config.yaml .yamllint.yaml
	.envs/lint/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	.envs/lint/bin/shellcheck tools/*.sh .ci/run

docs:
	@PYTHON='$(PYTHON)' tools/group_env.sh docs
	.envs/docs/bin/python tools/docs_site.py $(ARGS)

package:
	@PYTHON='$(PYTHON)' tools/group_env.sh package
	.envs/package/bin/python tools/package.py $(ARGS)

clean:
	rm -rf .venv .envs build dist install log *.egg-info .pytest_cache .hypothesis
	rm -rf worldmodel_ros/action worldmodel_ros/msg worldmodel_ros/srv worldmodel_ros/*.so
	find . -name __pycache__ -prune -exec rm -rf {} +
