# The work is in scripts/, which needs no make; these are names for it.
.PHONY: try test fixtures image clean

try:
	scripts/try

test:
	scripts/test

# The tiny OCI layouts, to look at or to test with.
fixtures:
	python3 fixtures/oci/generate.py target/fixtures/oci

# The real image of more than 1 GB, as root.
image:
	tests/images/make-real-image

clean:
	cargo clean
