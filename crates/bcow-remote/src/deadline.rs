//! Connections that keep to the deadline of a request.
//!
//! ureq waits for input a little longer after a deadline, each time it needs some. A server that
//! sends interim answers (1xx) without end would hold a request for ever.

use ureq::Error;
use ureq::unversioned::transport::{Buffers, ConnectionDetails, Connector, NextTimeout, Transport};

/// Makes the connections of another connector keep to deadlines.
#[derive(Debug)]
pub(crate) struct Deadlines;

/// A connection that ends a request at its deadline.
#[derive(Debug)]
pub(crate) struct Punctual<T>(T);

impl<In: Transport> Connector<In> for Deadlines {
    type Out = Punctual<In>;

    fn connect(
        &self,
        _: &ConnectionDetails<'_>,
        chained: Option<In>,
    ) -> Result<Option<Self::Out>, Error> {
        Ok(chained.map(Punctual))
    }
}

fn check(timeout: NextTimeout) -> Result<(), Error> {
    if timeout.after.is_zero() {
        Err(Error::Timeout(timeout.reason))
    } else {
        Ok(())
    }
}

impl<T: Transport> Transport for Punctual<T> {
    fn buffers(&mut self) -> &mut dyn Buffers {
        self.0.buffers()
    }

    fn transmit_output(&mut self, amount: usize, timeout: NextTimeout) -> Result<(), Error> {
        check(timeout)?;
        self.0.transmit_output(amount, timeout)
    }

    fn await_input(&mut self, timeout: NextTimeout) -> Result<bool, Error> {
        check(timeout)?;
        self.0.await_input(timeout)
    }

    fn is_open(&mut self) -> bool {
        self.0.is_open()
    }

    fn is_tls(&self) -> bool {
        self.0.is_tls()
    }
}
