# `make demo` and `make test` do all of their own set-up; see `make help`.
.DEFAULT_GOAL := help
.PHONY: help setup demo test clean

help:
	@echo 'make demo    drive the simulated robot with the world model and write pictures to out/demo/'
	@echo 'make test    run all tests'
	@echo 'make setup   only prepare: system packages (apt), .venv, and this project in it'
	@echo 'make clean   remove .venv, build output and generated modules; out/, with results and models of yours, stays'
	@echo
	@echo 'ARGS is passed on:    make demo ARGS="--help"    make test ARGS="-k gate -x"'
	@echo 'PYTHON chooses the interpreter of .venv (3.10 to 3.12):    make setup PYTHON=python3.12'

setup:
	@PYTHON='$(PYTHON)' tools/setup.sh

demo: setup
	.venv/bin/worldmodel demo $(ARGS)

test:
	@PYTHON='$(PYTHON)' tools/setup.sh --tests
	.venv/bin/python -m pytest $(ARGS)

clean:
	rm -rf .venv build install log *.egg-info .pytest_cache .hypothesis
	rm -rf worldmodel_ros/msg worldmodel_ros/srv worldmodel_ros/*.so
	find . -name __pycache__ -prune -exec rm -rf {} +
